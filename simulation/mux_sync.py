"""Seconds until new weights are in the decoding pool, over a slow link between the pools, pure. (RollMux, section 6)"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Bytes per second: of a connection between the pools, and of a broadcast in the decoding pool."""

    stream: float = 2.13e9  # fitted: 85 % of 20 Gbit/s
    among_nodes: float = 6.0e9  # fitted: the paper does not give this network
    in_node: float = 450e9  # NVLink of an H20, one direction
    node_gpus: int = 8

    def flat(self, num_bytes: float) -> float:
        """Return the seconds of one broadcast among all ranks: a single connection crosses, the rest keeps up."""
        return num_bytes / self.stream

    def in_parts(self, num_bytes: float, trainers: int, decoders: int, overlaps: bool = False) -> float:
        """Return the seconds when each training rank sends its part and the decoding pool broadcasts it.

        `overlaps`: pieces are broadcast while the next ones cross, as `overlap/weights.py` does; else after all.
        """
        crossing = num_bytes / trainers / self.stream
        broadcast = num_bytes / (self.among_nodes if decoders > self.node_gpus else self.in_node)
        return max(crossing, broadcast) if overlaps else crossing + broadcast
