"""A real model trained twice, plain and with speculative rollouts, side by side: `python -m examples.demo`."""
