"""Ray: a private cluster or an existing one, workers placed by the plan, and nothing left after the run.

`run_cluster` is the entry point. Ray reads its security settings once, on import, so these modules import it inside
functions, after `ray_cluster` has set them.
"""
