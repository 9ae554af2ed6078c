"""A graftlm plugin: records requests and steps in the folder that the environment names."""

import os

from graftlm_csv_recorder.csv_recorder import CsvRecorder

__all__ = ["CsvRecorder", "recorder"]

#: What the entry point names. Each process of a server imports it, and so has its own.
recorder = CsvRecorder.from_environment(os.environ)
