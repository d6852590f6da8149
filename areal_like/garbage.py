"""Python's garbage collector, which stops the event loop for 0.2 s where it looks through 10,000 requests in flight."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (2000, 10, 1000)  # a look through everything after 20 million objects more; Python's own is 70,000


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Have what is there now never looked through while the body runs, and what comes rarely."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
