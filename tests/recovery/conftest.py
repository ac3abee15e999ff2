"""Lets the tests of recovery import what they share (`crash_rig`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
