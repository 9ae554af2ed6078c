"""A graftlm plugin that writes requests and steps to CSV files in the folder `GRAFTLM_CSV_FOLDER`."""

import os

from graftlm_csv_recorder.csv_recorder import CsvRecorder

__all__ = ["CsvRecorder", "recorder"]

#: The plugin object that the entry point refers to. Each process of a server imports this module and has its own.
recorder = CsvRecorder.from_environment(os.environ)
