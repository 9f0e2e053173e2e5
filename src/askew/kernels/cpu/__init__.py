"""Kernels in C for the CPU, and their compiler."""
