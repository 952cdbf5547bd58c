"""The one lock of opake, which ``fork`` respects.

It is held while slots are written, while opake's own modules are imported for the first time, and
while Triton interprets a kernel.
A fork waits for it, so a child never starts with half a scope or with an import lock whose owner
is gone.
"""

from __future__ import annotations

import os
import threading

LOCK = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release
    )
