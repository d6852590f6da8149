"""Ray: a private cluster or an existing one, workers where the plan wants them, nothing left when the run ends.

`run_cluster` is the way in. Ray reads its security settings once, while it is imported, so these modules import it
inside functions, after `ray_cluster` has set them.
"""
