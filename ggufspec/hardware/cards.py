"""Common GPUs by name, for planning with a GPU that is not installed.

Figures are from the vendors' data sheets and architecture white papers (NVIDIA Turing, Ampere, Ada and Blackwell; AMD's
and Intel's product pages): memory as marketed, in GiB; bandwidth in 10⁹ bytes per second. fp16 is the rate of the
matrix units for dense matrices with 32-bit accumulation or, on GPUs without such units or without fast fp16, the best
shader rate. The driver and a desktop reserve 0.3 to 1 GiB of the memory.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ggufspec.errors import UsageError


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU as its vendor describes it; ``fp16_flops`` is per second, and ``architecture`` a heading in ``_TABLE``."""

    name: str
    vram_bytes: int
    bandwidth_bytes_per_s: float
    pcie_generation: int
    pcie_width: int
    fp16_flops: float
    architecture: str = ""

    @property
    def shares_memory(self) -> bool:
        """True if the GPU uses host memory."""
        return self.name.startswith(("Apple ", "GB10", "Radeon ", "Arc 140V"))

    @property
    def usable_bytes(self) -> int:
        """Usable memory; Apple's driver offers 11.84 of 16 GiB (github.com/AlexsJones/llmfit/pull/754)."""
        return int(0.74 * self.vram_bytes) if self.architecture == "Apple" else self.vram_bytes


# name; GiB; GB/s; PCIe generation × lanes; fp16 TFLOP/s. If a GPU uses host memory, GiB is a usual size of it.
_TABLE = """
[Pascal]
GTX 1060 6GB                    6   192  3x16    4.4
GTX 1070                        8   256  3x16    6.5
GTX 1080                        8   320  3x16    8.9
GTX 1080 Ti                    11   484  3x16   11.3
P40                            24   346  3x16   11.8
GTX 1050 Ti                     4   112  3x16    2.1
P100 16GB                      16   732  3x16   18.7
[Volta]
V100 16GB                      16   900  3x16  112.0
V100 32GB                      32   900  3x16  112.0
[Turing]
GTX 1660 Super                  6   336  3x16   10.0
GTX 1660 Ti                     6   288  3x16   11.0
RTX 2060 6GB                    6   336  3x16   25.8
RTX 2060 12GB                  12   336  3x16   28.7
RTX 2070                        8   448  3x16   29.9
RTX 2070 Super                  8   448  3x16   36.3
RTX 2080                        8   448  3x16   40.3
RTX 2080 Super                  8   496  3x16   44.6
RTX 2080 Ti                    11   616  3x16   53.8
T4                             16   320  3x16   65.0
[Ampere]
RTX 3050 8GB                    8   224  4x8    18.2
RTX 3060 8GB                    8   240  4x16   25.5
RTX 3060 12GB                  12   360  4x16   25.5
RTX 3060 Ti                     8   448  4x16   32.4
RTX 3070                        8   448  4x16   40.6
RTX 3070 Ti                     8   608  4x16   43.5
RTX 3080 10GB                  10   760  4x16   59.5
RTX 3080 12GB                  12   912  4x16   61.3
RTX 3080 Ti                    12   912  4x16   68.2
RTX 3090                       24   936  4x16   71.0
RTX 3090 Ti                    24  1008  4x16   80.0
RTX A2000 6GB                   6   288  4x16   31.9
RTX A2000 12GB                 12   288  4x16   31.9
RTX A4000                      16   448  4x16   76.7
RTX A4500                      20   640  4x16   94.6
RTX A5000                      24   768  4x16  111.1
RTX A6000                      48   768  4x16  154.8
A10                            24   600  4x16  125.0
RTX 3080 Ti Laptop             16   512  4x16   38.0
A40                            48   696  4x16  149.7
[GA100]
A100 40GB                      40  1555  4x16  312.0
A100 80GB                      80  1935  4x16  312.0
[Ada]
RTX 4060                        8   272  4x8    30.2
RTX 4060 Ti 8GB                 8   288  4x8    44.1
RTX 4060 Ti 16GB               16   288  4x8    44.1
RTX 4070                       12   504  4x16   58.3
RTX 4070 Super                 12   504  4x16   70.9
RTX 4070 Ti                    12   504  4x16   80.2
RTX 4070 Ti Super              16   672  4x16   88.2
RTX 4080                       16   717  4x16   97.5
RTX 4080 Super                 16   736  4x16  104.4
RTX 4090                       24  1008  4x16  165.2
RTX 2000 Ada                   16   224  4x8    48.0
RTX 4000 Ada                   20   360  4x16  106.8
RTX 4500 Ada                   24   432  4x16  158.4
RTX 5000 Ada                   32   576  4x16  261.1
RTX 6000 Ada                   48   960  4x16  364.2
L4                             24   300  4x16  121.0
L40S                           48   864  4x16  362.0
[Hopper]
H100 PCIe                      80  2000  5x16  756.0
H100 SXM                       80  3350  5x16  989.0
H200                          141  4800  5x16  989.0
[Blackwell]
RTX 5060                        8   448  5x8    38.4
RTX 5060 Ti 8GB                 8   448  5x8    47.4
RTX 5060 Ti 16GB               16   448  5x8    47.4
RTX 5070                       12   672  5x16   61.7
RTX 5070 Ti                    16   896  5x16   87.9
RTX 5080                       16   960  5x16  112.6
RTX 5090                       32  1792  5x16  209.5
RTX PRO 6000 Blackwell         96  1792  5x16  503.8
RTX 5060 Laptop                 8   384  5x8    37.0
RTX 5070 Laptop                 8   384  5x8    46.0
RTX 5080 Laptop                16   896  5x16   90.0
RTX 5090 Laptop                24   896  5x16  110.0
RTX PRO 3000 Blackwell Laptop  12   672  5x16   61.0
GB10                          128   273  5x16  100.0
[RDNA2]
RX 6700 XT                     12   384  4x16   26.4
RX 6800                        16   512  4x16   32.3
RX 6800 XT                     16   512  4x16   41.5
RX 6900 XT                     16   512  4x16   46.1
RX 6950 XT                     16   576  4x16   47.3
[RDNA3]
RX 7600                         8   288  4x8    43.5
RX 7600 XT                     16   288  4x8    45.1
RX 7700 XT                     12   432  4x16   70.3
RX 7800 XT                     16   624  4x16   74.6
RX 7900 GRE                    16   576  4x16   91.9
RX 7900 XT                     20   800  4x16  103.2
RX 7900 XTX                    24   960  4x16  122.8
Pro W7800                      32   576  4x16   90.5
Pro W7900                      48   864  4x16  122.6
Radeon 780M                    16    90  4x8     8.3
Radeon 890M                    32    90  4x8    11.9
Radeon 8060S                   96   256  4x16   29.7
[RDNA4]
RX 9060 XT 8GB                  8   320  5x16  103.0
RX 9060 XT 16GB                16   320  5x16  103.0
RX 9070                        16   640  5x16  145.0
RX 9070 XT                     16   640  5x16  195.0
Pro R9700                      32   640  5x16  191.0
[Arc]
Arc A750                        8   512  4x16  114.7
Arc A770 8GB                    8   512  4x16  131.0
Arc A770 16GB                  16   560  4x16  131.0
Arc B570                       10   380  4x8   101.5
Arc B580                       12   456  4x8   116.5
Arc 140V                       16   137  5x8    64.0
[Apple]
Apple M1                        8    68  4x16    2.6
Apple M1 Pro                   16   200  4x16    5.3
Apple M1 Max                   32   400  4x16   10.6
Apple M1 Ultra                 64   800  4x16   21.2
Apple M2                       16   100  4x16    3.6
Apple M2 Pro                   16   200  4x16    6.8
Apple M2 Max                   32   400  4x16   13.6
Apple M2 Ultra                 64   800  4x16   27.2
Apple M3                       16   102  4x16    4.1
Apple M3 Pro                   18   154  4x16    7.4
Apple M3 Max                   48   409  4x16   16.3
Apple M3 Ultra                 96   819  4x16   32.8
Apple M4                       16   120  4x16    4.3
Apple M4 Pro                   24   273  4x16    9.2
Apple M4 Max                   48   546  4x16   18.4
Apple M5                       16   153  4x16    8.3
Apple M5 Pro                   24   307  4x16   16.6
Apple M5 Max                   48   614  4x16   33.2
"""


def _parse(table: str) -> Iterator[GpuModel]:
    architecture = ""
    for line in table.strip().splitlines():
        if line.startswith("["):
            architecture = line.strip("[]")
            continue
        name, vram, bandwidth, link, fp16 = line.rsplit(maxsplit=4)
        generation, width = map(int, link.split("x"))
        yield GpuModel(
            name, int(vram) << 30, float(bandwidth) * 1e9, generation, width, float(fp16) * 1e12, architecture
        )


CARDS = tuple(_parse(_TABLE))

_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|amd|radeon|intel|arc|\(r\)|\(tm\)|[®™]|graphics|generation|workstationedition"
    r"|aipro(?=r9)|gpu|\(radv.*\)"
)
_SERIES = re.compile(r"^(rtx|gtx|rx|pro|apple) ", re.IGNORECASE)
# NVML's names for variants that NVIDIA's product pages name differently.
_ALIASES = {
    "h10080gbhbm3": "H100 SXM",
    "a100pcie40gb": "A100 40GB",
    "a100sxm440gb": "A100 40GB",
    "a10080gbpcie": "A100 80GB",
    "a100sxm480gb": "A100 80GB",
    "v100pcie16gb": "V100 16GB",
    "v100sxm216gb": "V100 16GB",
    "v100pcie32gb": "V100 32GB",
    "v100sxm232gb": "V100 32GB",
}
_VARIANT = re.compile(r" (\d+GB|PCIe|SXM|Blackwell)$")


def find_card(name: str) -> GpuModel:
    """Find a GPU by ``name``; case and spaces do not matter, and "NVIDIA GeForce" and "RTX" are optional.

    Raises:
        UsageError: no GPU has this name, or several variants do.
    """
    key = _key(name)
    found = _called(key)
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"there is more than one {name.strip()}", f"say which: {_listed(card.name for card in found)}")
    near = difflib.get_close_matches(key, [alias for card in CARDS for alias in _names(card)], n=3, cutoff=0.7)
    names = dict.fromkeys(card.name for alias in near for card in _called(alias))
    nearest = f"the nearest: {_listed(names)}; or " if names else ""
    raise UsageError(f"no GPU called {name!r} is known", f"{nearest}give its memory instead: --vram 24GiB")


def recognise(name: str, total_bytes: int) -> GpuModel | None:
    """Return the GPU that its driver calls ``name``, in the variant with the nearest memory size; None if unknown."""
    return min(_called(_key(name)), key=lambda card: abs(card.vram_bytes - total_bytes), default=None)


def _called(key: str) -> list[GpuModel]:
    return [card for card in CARDS if key in _names(card) or _ALIASES.get(key) == card.name]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _key(name: str) -> str:
    squeezed = re.sub(r"[\s_-]+", "", name.casefold())
    return _NOISE.sub("", squeezed).replace("gib", "gb")


def _names(card: GpuModel) -> set[str]:
    """Return all names of a GPU, with and without its series and its variant."""
    names = {card.name, _VARIANT.sub("", card.name)}
    return {_key(name) for name in (*names, *(_SERIES.sub("", name) for name in names))}
