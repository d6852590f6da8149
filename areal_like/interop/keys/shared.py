"""Values of `shared.toml` that the rules use, too."""

from areal_like.interop.keys.entries import read

_REASONS = read("shared")["reasons"]
NO_ALGORITHM, TRAINERS_ROUTES, VIDEO = (_REASONS[name] for name in ("no_algorithm", "trainers_routes", "video"))
ALL_WORDS = read("shared")["values"]["all_words"]  # values of top_k that set no limit
SYNONYMS = read("shared")["synonyms"]
ESTIMATORS = {"kl": "k1", "low_var_kl": "k3", "mse": "k2", "kl+": "k1", "low_var_kl+": "k3", "k3+": "k3"}
