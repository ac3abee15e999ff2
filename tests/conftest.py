"""Settings that every test shares."""

from hypothesis import settings

# The fixtures that users get too: holdfast_store, fault_disk, killable.
pytest_plugins = ["holdfast.recovery.pytest_plugin"]

# The machine's speed is nobody's promise, and every failure must be repeatable from its output.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")
