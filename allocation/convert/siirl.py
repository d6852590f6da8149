"""siiRL: verl's engine settings, all engines on one pool of GPUs. Keys as in `siirl/params/model_args.py`.

ETP left out is 1 here, and the reference does not follow the actor.
"""

from allocation.convert import verl

SYSTEM = verl.system("siirl", verl.Dialect("siiRL", etp_follows_tp=False, ref_follows_actor=False))
