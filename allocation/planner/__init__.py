"""Layouts of trainer and servers for a model on a cluster, best first, by predicted step time under the memory model.

An asynchronous step takes as long as its slower side, `max(training, rollout)`, plus the weight update; the
step time of synchronous training is the sum. Arithmetic, memory traffic and links are scaled by the shares in
`efficiency.py`, which marks the measured ones. The planner proposes only layouts that the compiler accepts and
that fit in memory.
"""
