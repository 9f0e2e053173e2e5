"""Words of a round's record that those who train and those who read run folders share."""

from __future__ import annotations

RECORD = (  # keys of a round's record that are the server's own
    *("round", "participants", "train_loss", "accuracy", "loss", "bytes_up", "bytes_down", "seconds", "dropped"),
    *("absent", "incidents", "lost_share", "epsilon"),
)
TIMES = ("seconds_clients", "seconds_server")  # where they are recorded
REPEATED = "second answer"  # a reason why an answer is not used: the first one is, and nothing is lost
