"""The command line of AReaL's tutorial, as it prints it, with the shell's quotes."""

import shlex

OVERRIDES = shlex.split("""
scheduler.type=ray experiment_name=moe trial_name=first rollout.backend=sglang:d4t4
actor.backend='megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)' cluster.n_nodes=4 cluster.n_gpus_per_node=8
actor.path=Qwen/Qwen3-30B-A3B actor.megatron.use_deterministic_algorithms=True
""")
