"""Devices, links and nodes: their figures, the known ones, what this process sees, and the cluster file."""

from .cluster_file import ClusterParts as ClusterParts
from .cluster_file import read_cluster_file as read_cluster_file
from .cluster_text import write_cluster_file as write_cluster_file
from .detect import detect_nodes as detect_nodes
from .device import DEVICE_KINDS as DEVICE_KINDS
from .device import FLOPS_CLASSES as FLOPS_CLASSES
from .device import DeviceSpec as DeviceSpec
from .device import GpuTarget as GpuTarget
from .device import Link as Link
from .device import Node as Node
from .device import Wire as Wire
from .efficiency import OPERATOR_CLASSES as OPERATOR_CLASSES
from .efficiency import Curve as Curve
from .efficiency import Points as Points
from .presets import DEVICE_PRESETS as DEVICE_PRESETS
from .presets import DevicePreset as DevicePreset
from .presets import default_link as default_link
from .routes import Route as Route
from .routes import Routes as Routes
from .routes import WayChoice as WayChoice
from .routes import loads_of as loads_of
from .wires import unreachable_text as unreachable_text
