"""siiRL: verl's engine settings, with all engines on one pool of GPUs.

`siirl/params/model_args.py` defines the keys. An omitted ETP is 1, and the reference does not follow the actor.
"""

from allocation.convert import verl

SYSTEM = verl.system("siirl", verl.VerlDialect("siiRL", etp_follows_tp=False, ref_follows_actor=False))
