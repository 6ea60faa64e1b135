"""The peak rates of accelerators and of the links between them. The module needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The peak rates of one device."""

    flops: float  # floating-point operations per second; a multiply-add counts as two
    memory: float  # memory in bytes
    memory_bandwidth: float  # bytes per second
    link: float  # network bandwidth in bytes per second, in each direction

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Device: {name} must be positive, got {value!r}")


@dataclass(frozen=True)
class Accelerator(Device):
    """A device in a domain of faster links; `link` is between domains. Latencies are in seconds."""

    domain: int  # number of devices in a domain
    domain_link: float  # bytes per second, in each direction
    domain_latency: float = 3.4e-6  # of a step of a collective
    latency: float = 9.6e-6  # between domains


# NVIDIA's data sheets of H100 SXM, H200 SXM, HGX B200, GB200 NVL72 and GB300 NVL72: half of the
# bfloat16 rates with sparsity. Links: NVLink, and one network adapter for each GPU (ConnectX-7 of
# 400 Gb/s; ConnectX-8 of 800 Gb/s in GB300). Latencies: Ring, Simple, NVLINK and NET of hwLat in
# src/graph/tuning.cc of NCCL.
ACCELERATORS = {
    "h100": Accelerator(989e12, 80e9, 3.35e12, 50e9, 8, 450e9),
    "h200": Accelerator(989e12, 141e9, 4.8e12, 50e9, 8, 450e9),
    "b200": Accelerator(2.25e15, 180e9, 7.7e12, 50e9, 8, 900e9),
    "gb200": Accelerator(2.5e15, 186e9, 8e12, 50e9, 72, 900e9),
    "gb300": Accelerator(2.5e15, 279e9, 8e12, 100e9, 72, 900e9),
}
# The vendors' peak rates too, float32 for k40 and bfloat16 for a100; links connect machines. The
# paper does not name its network: 10 Gb/s give the "thousands to one" of Sec. 3.2.
DEVICES = {
    "k40": Device(4.29e12, 12e9, 288e9, 1.25e9),
    "a100": Device(312e12, 80e9, 2.04e12, 25e9),
    **ACCELERATORS,
}
