"""``python -m replayssm_tune.tuner.cli``: the same as ``replayssm-tune``."""

from .main import main

if __name__ == "__main__":
    main()
