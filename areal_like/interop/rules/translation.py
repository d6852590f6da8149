"""The state of one conversion: another system's settings, our values and the notes about them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from allocation.plan import Plan
from areal_like.interop.keys.shared import ALL_WORDS, ESTIMATORS

MISSING = "???"  # OmegaConf's mark for a value that the user must fill in
_HEADINGS = {
    "changes": "changes training",
    "missing": "to be set by the user (???)",
    "refused": "refused by the run's checks",
    "renamed": "renamed",
    "unneeded": "unnecessary",
}
_QUIET = ("renamed", "unneeded")
NO_NORM: dict[str, Any] = {"mean_level": None, "mean_leave1out": False, "std_level": None, "std_unbiased": False}
BATCH_NORM = {"mean_level": "batch", "std_level": "batch", "std_unbiased": True}
GROUP_NORM = {"mean_level": "group", "std_level": "group", "std_unbiased": True}


def split_list(value: object) -> list[str]:
    """Return the items of a list, which a command line writes as text."""
    if value is None:
        return []
    parts = value if isinstance(value, list) else str(value).strip("[]()").split(",")
    return [str(part).strip(" '\"") for part in parts]


@dataclass
class Translation:
    """Settings of another system (`said`, with None for null), our values, and the run's YAML that they become.

    Notes are kept by key, one each. `changes`: training changes; `missing`: `???` in the YAML; `refused`: values that a
    run's checks refuse (`areal_like.interop.checks`); `renamed` and `unneeded` change nothing. `problems` are the
    unreadable parts.
    """

    system: str
    said: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    unneeded: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    layout: Plan | None = None
    yaml: str = ""

    @property
    def data_parallel(self) -> int | None:
        """Data-parallel size of the actor, None without a layout."""
        engines = self.layout.engines if self.layout else ()
        return next((engine.sizes.dp for engine in engines if engine.role == "actor"), None)

    def get(self, *keys: str) -> Any:
        """Return the value of the first key that is set, else the other system's default of the first that has one."""
        for source in (self.said, self.defaults):
            for key in keys:
                if key in source:
                    return source[key]
        return None

    def is_on(self, *keys: str) -> bool:
        """Return whether a switch is true, by its value or by the other system's default."""
        return str(self.get(*keys)).lower() in ("true", "1", "1.0")

    def number(self, *keys: str) -> float | int | None:
        """Return a number, None for any other value."""
        value = self.get(*keys)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def keys_below(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Return the set keys below a section, each with its value."""
        return ((key, value) for key, value in self.said.items() if key.startswith(prefix + "."))

    def fill(self, key: str, why: str) -> None:
        """Leave one of our values to the user."""
        self.ours[key] = MISSING
        self.missing[key] = why

    def norm(self, key: str, **levels: Any) -> None:
        """Write a complete normalisation, which replaces the algorithm's own."""
        self.ours |= {f"{key}.{name}": value for name, value in {**NO_NORM, **levels}.items()}

    def adapters(self, rank: Any, alpha: Any = None, modules: Any = None) -> None:
        """Write LoRA of a rank; without modules, or with all of them, every linear layer has an adapter."""
        self.ours |= {"actor.use_lora": True, "actor.lora_rank": rank}
        if alpha is not None:
            self.ours["actor.lora_alpha"] = alpha
        if modules and modules not in ("all-linear", "all"):
            self.ours["actor.target_modules"] = split_list(modules)

    def final_rate(self, least: str, most: str, ours: str = "actor.optimizer") -> None:
        """Write the last learning rate as a share of the highest."""
        low, high = self.number(least), self.number(most)
        if low and high:
            self.ours[f"{ours}.min_lr_ratio"] = low / high

    def minibatches(self, whole: Any, part: Any, key: str) -> None:
        """Write the optimizer steps of a training step from the sizes of batch and mini-batch."""
        if isinstance(whole, int) and isinstance(part, int) and part > 0:
            steps = max(1, whole // part)
            self.ours["actor.ppo_n_minibatches"] = steps
            if whole % part and whole > part:
                self.changes[key] = f"{whole} samples do not divide into mini-batches of {part}; {steps} steps are used"
        else:
            self.fill("actor.ppo_n_minibatches", f"optimizer steps per training step: {key} is unknown")

    def unknown_algorithm(self, key: str, why: str) -> None:
        """Refuse to guess an algorithm."""
        self.changes[key] = why
        self.fill("algorithm", why)

    def divergence(self, in_reward: str, in_loss: str | None) -> None:
        """Write the estimator of both KL terms from the keys that name theirs."""
        loss = "k3" if in_loss is None else str(self.get(in_loss))
        self.estimator((in_reward, str(self.get(in_reward))), (in_loss or in_reward, loss))

    def estimator(self, in_reward: tuple[str, str], in_loss: tuple[str, str]) -> None:
        """Write the estimator of the KL terms with a weight; each argument is the other system's key and estimator.

        If both terms have a weight, the estimator is null: k1 in the reward and k3 in the loss.
        """
        both = [bool(self.ours.get(f"actor.{key}")) for key in ("kl_ctl", "kl_loss_coef")]
        (reward_key, reward), (loss_key, loss) = in_reward, in_loss
        if both[0] and ESTIMATORS.get(reward, reward) != "k1":
            self.changes[reward_key] = f"{reward}: only k1 in the reward has the gradient of the divergence; k1 is used"
        if both[1] and ESTIMATORS.get(loss, loss) not in (("k3",) if both[0] else ("k2", "k3")):
            self.changes[loss_key] = (
                f"{loss}: k1 in the loss has no gradient towards the reference, and beside actor.kl_ctl it is k3; k3 is used"
            )
            loss = "k3"
        if any(both):
            self.ours["actor.kl_estimator"] = None if all(both) else "k1" if both[0] else ESTIMATORS.get(loss, loss)

    def evaluate(self, section: str, temperature: Any, top_p: Any, top_k: Any) -> None:
        """Write the sampling of evaluations; greedy ones have no other settings."""
        if temperature is None:
            return
        self.ours[f"{section}.temperature"] = temperature
        if temperature != 0:
            limit = ALL_WORDS.get(str(top_k), top_k)
            own = {"top_p": 1.0 if top_p is None else top_p, "top_k": -1 if limit is None else limit}
            self.ours |= {f"{section}.{name}": value for name, value in own.items()}

    def replay(self, on: bool) -> None:
        """Write whether models with experts replay the servers' routes (R3)."""
        self.ours["rollout.router_replay"] = "auto" if on else "off"

    def behaviour(self, mode: str, cap: Any = None, floor: Any = None) -> None:
        """Write the behaviour weight and its bounds."""
        self.ours["actor.behave_imp_weight_mode"] = mode
        if mode != "disabled" and cap is not None:
            self.ours["actor.behave_imp_weight_cap"] = cap
        if mode != "disabled" and (floor or mode.startswith("geometric")):  # the default is not 0
            self.ours["actor.behave_imp_weight_floor"] = floor or 0

    @property
    def same(self) -> bool:
        """Return whether the run, once completed, trains as the other system's configuration does."""
        return not self.changes and not self.problems

    @property
    def ready(self) -> bool:
        """Return whether the YAML is a run that trains as the other system's configuration does."""
        return self.same and not self.missing and not self.refused

    def report(self, *, verbose: bool = True) -> str:
        """Return the verdict, and the notes under the heading of their class, one line per key.

        If not `verbose`, the keys that need no attention are only counted.
        """
        parts = [self._verdict(), *(f"error: {problem}" for problem in self.problems)]
        for name, heading in _HEADINGS.items():
            notes = getattr(self, name)
            if notes and (verbose or name not in _QUIET):
                parts += [f"{heading}:", *(f"  {key}: {note}" for key, note in notes.items())]
        if not verbose and (quiet := [f"{len(getattr(self, n))} {_HEADINGS[n]}" for n in _QUIET if getattr(self, n)]):
            parts.append(f"{', '.join(quiet)}: list these keys with --verbose")
        return "\n".join(parts)

    def _verdict(self) -> str:
        """Return the result in one line."""
        if self.problems:
            return "Not converted: the input was not read in full."
        if self.ready:
            return "Converted: the run trains as the configuration does."
        counts = {
            "changes training": len(self.changes),
            "must be set by you": len(self.missing),
            "refused by the run's checks": len(self.refused),
        }
        return f"Not ready to run: {'; '.join(f'{number} {what}' for what, number in counts.items() if number)}."
