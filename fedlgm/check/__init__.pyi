# The public names of this package, which load when they are first used; this list is the only one.

from .configuration_file import check_file as check_file
from .readers.flower import flower as flower
from .readers.nvflare import nvflare as nvflare
from .readers.opacus import opacus as opacus
from .readers.opacus import opacus_arguments as opacus_arguments
from .readers.tensorflow_privacy import tensorflow_privacy as tensorflow_privacy
from .report import RULES as RULES
from .report import Report as Report
from .report import check as check
from .script import read_script as read_script
from .settings import Settings as Settings
from .settings import build_settings as build_settings
from .verdict import Verdict as Verdict
