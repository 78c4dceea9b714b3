"""What this computer offers: processor, cores that may be used, memory. The standard library alone, and quick."""

from ondevice.machine.cache import cache_directory
from ondevice.machine.cores import core_processors, default_threads, physical_cores, processors
from ondevice.machine.home import expanded, home
from ondevice.machine.memory import available_bytes, memory_warning, peak_rss_bytes, reset_peak_rss, total_bytes
from ondevice.machine.processor import arm_dot_products, os_name, processor_name

__all__ = [
    "arm_dot_products",
    "available_bytes",
    "cache_directory",
    "core_processors",
    "default_threads",
    "expanded",
    "home",
    "memory_warning",
    "os_name",
    "peak_rss_bytes",
    "physical_cores",
    "processor_name",
    "processors",
    "reset_peak_rss",
    "total_bytes",
]
