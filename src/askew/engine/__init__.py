"""Engines run a cohort's local training; the server around them runs one round.

base.py        what goes into an engine and what comes out: read it first

engines        sequential.py, the reference; vmapped.py; for CUDA slots.py (with jobs.py, graphs.py, sample_buffer.py)
               and stacked.py (with row_buffers.py, row_moves.py too); results.py, the rows that they fill
which one      choose.py by rule and by trial; check.py, whether its results are right; settings.py
processes      process_group.py and distributed.py, where several share a run

the server     server.py, what lasts and the order of a round; current_round.py, a round under way; server_step.py, what
               answers make of the model and the state; server_hooks.py, the method's functions, checked
its numbers    client_numbers.py, what clients are as numbers; messages.py and expected_uploads.py, what travels
virtual time   clock.py; overlapping_clock.py, client_draws.py and overlapping_server.py, where answers may come later

answers        answers.py and finite.py, which ones are refused; faults.py and attacks.py, which make wrong ones
protection     robust.py and robust_rules.py; privacy.py, privacy_stage.py, privacy_support.py, noise.py, accounting.py
metrics        evaluate.py, drift.py, round_metrics.py
"""
