"""What lies in `inside` runs in the guest only, where there is a device."""

from __future__ import annotations

import os

GUEST = "MCJAX_GUEST"
"""Set in the guest."""

collect_ignore = [] if os.environ.get(GUEST) else ["inside"]
