"""What every test needs before it starts."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import torchvision_ops  # noqa: E402, F401
