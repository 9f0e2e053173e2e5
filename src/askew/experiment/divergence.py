"""When a run counts as diverged: a rule on the records of its rounds alone, and what to try then.

A round is bad if

- clients answered, and not one answer was finite, or the new model was not (the model then stays as it was); or
- the model's loss on the test set is not finite; or
- the training loss is more than FACTOR times that of guessing, which is the logarithm of the number of classes (in a
  regression: more than FACTOR times that of the first round), and no lower than the lowest before it.

A run has diverged when ROUNDS rounds in a row are bad; one with fewer rounds, when all its rounds are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.records import Record
from ..engine.answers import MODEL_NOT_FINITE, NOT_FINITE

ROUNDS = 3  # bad rounds in a row
FACTOR = 10.0  # times the loss of guessing


def divergence_sentence(records: Sequence[Record], classes: int, rounds: int, lr: float, every: int = 0) -> str | None:
    """That a run of so many rounds has diverged by its last record, and what to try; None if it has not.

    The model is measured after `every` so many rounds; 0: perhaps after none.
    """
    wanted, limit = min(ROUNDS, rounds), loss_limit(records, classes)
    bad = (is_bad(records, len(records) - 1 - back, limit, every) for back in range(wanted))
    if len(records) < wanted or not all(bad):
        return None
    first, last = records[-wanted]["round"], records[-1]["round"]
    when = f"in rounds {first} to {last}" if wanted > 1 else f"in round {last}"
    losses = [record["train_loss"] for record in records[-wanted:] if not is_not_finite(record, every)]
    what = f"the training loss reached {max(losses):.3g} (the limit is {limit:.3g})" if losses else "nothing was finite"
    return (
        f"diverged: {when} {what}; try a lower local.lr (now {lr:g}), local.clip = 10, or weaker settings of the method"
    )


def is_bad(records: Sequence[Record], n: int, limit: float, every: int) -> bool:
    """Is the round of the n-th record bad?"""
    if is_not_finite(records[n], every):
        return True
    loss = records[n]["train_loss"]
    if loss is None or loss <= limit:
        return False
    earlier = [record["train_loss"] for record in records[:n] if record["train_loss"] is not None]
    return bool(loss >= min(earlier, default=0.0))


def is_not_finite(record: Record, every: int) -> bool:
    """Was no result of this round finite, or the test loss not?

    A record that was stored and read again has None for a loss that is not finite, and for one that was not measured.
    """
    reasons, loss = record.get("incidents", {}), record.get("loss")
    lost = NOT_FINITE in reasons or MODEL_NOT_FINITE in reasons
    all_lost = lost and record["dropped"] >= len(record["participants"])
    measured = record.get("accuracy") is not None or (every and record["round"] % every == 0)
    return all_lost or bool(measured if loss is None else not math.isfinite(loss))


def loss_limit(records: Sequence[Record], classes: int) -> float:
    """The training loss above which a round may be bad; infinity where nothing can be said."""
    if classes > 1:
        return FACTOR * math.log(classes)
    return FACTOR * next((r["train_loss"] for r in records if r["train_loss"]), math.inf)
