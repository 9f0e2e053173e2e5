"""The rules of a deployment: where its run is stored, and how the server waits for its clients."""

from __future__ import annotations

from pathlib import Path

from ..core.settings import Settings, setting
from ..errors import ConfigError
from ..experiment.config import Config
from ..experiment.store import read_json
from ..participation import CohortParticipation


class DeploymentRules(Settings):
    """How a deployment waits for its clients; Flower's run configuration holds these settings."""

    title = "deployment"
    out: str = setting("folder of the run's folder, on the server's machine", default="runs")
    fresh: bool = setting("start over where the run's folder exists already", default=False)
    nodes: int = setting("clients to wait for before the first round; 0: all of them", default=0, least=0)
    wait: float = setting("seconds to wait for them", default=600.0, above=0)
    hello: float = setting("seconds in which a new node must say which client it is", default=60.0, above=0)
    timeout: float = setting("seconds in which a client must answer, each phase of a round", default=600.0, above=0)
    answers: int = setting("least number of answers; a round with fewer is thrown away", default=1, least=1)
    spare: float = setting(
        "fraction of additional clients that are asked; the round waits only for the wanted number of answers; "
        "0.5: three are asked for every two wanted",
        default=0.0,
        least=0,
        most=10,
    )
    buffer: int = setting(
        "answers that make a step of the server; as many clients as the cohort has are at work all the time, and each "
        "starts from the newest model; 0: rounds, whose clients start together",
        default=0,
        least=0,
    )

    def facts(self) -> dict[str, int]:
        """What of these rules changes the results of a run and belongs to its facts."""
        return {"buffer": self.buffer} if self.buffer else {}


def check_same_buffer(folder: Path, rules: DeploymentRules) -> None:
    """Refuse a folder that holds a run with another buffer, which is another run."""
    facts = read_json(folder / "run.json")
    if facts and facts.get("buffer", 0) != rules.buffer:
        raise ConfigError(
            f"{folder} holds this run with buffer = {facts.get('buffer', 0)}, and buffer = {rules.buffer} is another "
            "run; set that rule, another folder in out, or fresh = true."
        )


def check_answers(config: Config, rules: DeploymentRules) -> None:
    """Refuse more answers than a round waits for, with spare clients or without: every round would be thrown away."""
    rule, clients = config.participation, config.partition.clients
    most = rule.size(clients) if isinstance(rule, CohortParticipation) else clients
    if rules.answers > most:
        raise ConfigError(
            f"deployment: answers must be at most the number that a round waits for, {most}, got {rules.answers}; "
            "lower it, or let more clients take part."
        )
