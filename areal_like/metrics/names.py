"""Names of files in the directory of a run."""

ABOUT_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
SUMMARY_FILE = "summary.json"  # written after the last step
