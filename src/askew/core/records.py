"""Words of a round's record that those who train and those who read run folders share."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]  # of one round
RECORD = (  # keys of a round's record that are the server's own
    *("round", "participants", "train_loss", "accuracy", "loss", "bytes_up", "bytes_down", "seconds", "dropped"),
    *("absent", "incidents", "lost_share", "epsilon", "unreachable", "checksum"),
)
CLOCK = ("clock", "began", "asked", "late", "away", "answer_seconds")  # where there is a virtual clock
OVERLAPPING = ("started", "started_at", "staleness")  # where answers may be used in later rounds
TIMES = ("seconds_clients", "seconds_server")  # where they are recorded
WIRE = ("wire_down", "wire_up")  # of deployments
MEASURED = (  # where the configuration asks for them; those of drift begin with DRIFT
    *("accuracy_choose", "accuracy_report", "accuracy_rare", "accuracy_common", "accuracy_validation"),
    *("loss_validation", "class_accuracy", "client_accuracy_mean", "client_accuracy_worst10"),
    *("client_accuracy_best10", "client_accuracy_std", "client_test_accuracy_std", "often_gap", "raised", "fit_loss"),
    *("weights_entropy", "weights_size", "public_share", "public_ratio", "privacy_clip"),
)
DRIFT = "drift_"
REPEATED = "second answer"  # a reason why an answer is not used: the first one is, and nothing is lost
# Reasons why nothing came of a client that was asked:
NO_ANSWER = "no answer"
LATE = "late answer"  # counted in the round in which it was due; when it comes, it is an answer to another round
CLIENT_ERROR = "error at the client"
NOT_AWAITED = "enough others answered first"  # where spare clients are asked
LEFT = "left before its answer"  # where clients come and go on a virtual clock
NOTHING_CAME = (NO_ANSWER, LATE, CLIENT_ERROR, NOT_AWAITED, LEFT)


def is_record_key(name: str) -> bool:
    """May a round's record have this key for what is askew's own? A method's numbers need other names."""
    return name in (*RECORD, *CLOCK, *OVERLAPPING, *TIMES, *WIRE, *MEASURED) or name.startswith(DRIFT)
