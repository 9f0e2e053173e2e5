"""All hand-written speed, behind one question: can you take this? Then take it.

interface.py     Kernels: what engines, networks and tasks ask; None means: the plain code does it
affine.py        whose local steps may be taken by a kernel: declared by the method, owned, and checked
affine_rows.py   such steps of many rows at once, in place
steps.py         local steps in C on a CPU: asked for by method and client, checked, then taken
dense.py         which networks are trained in C on a CPU: linear layers and ReLUs in a row
batched_linear.py  linear layers of many networks at once
batched_lstm.py  LSTM layers of many networks at once
layers.py        a network's layers in a row, several of them at once
cpu/             kernels in C and their compiler
cuda/            kernels in Triton and in CUDA C

Nothing here decides what is computed, only how. The local loop (core/local.py) and the methods do not import it.
"""
