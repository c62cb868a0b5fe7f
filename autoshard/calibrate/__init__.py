"""Measures the devices at hand and makes a cluster of what was measured."""

from .clock import Measured as Measured
from .clock import best_clock as best_clock
from .clock import measure as measure
from .fit import LinkFit as LinkFit
from .fit import fit_link as fit_link
from .record import Record as Record
from .run import Calibration as Calibration
from .run import Progress as Progress
from .run import calibrate as calibrate
