"""A bundle in a few lines of text."""

from __future__ import annotations

from tvm_fuse.cuda.bundle import Bundle, Output, Port

__all__ = ["render_bundle"]

_MB = 1e6


def render_bundle(bundle: Bundle) -> str:
    """What is in a bundle, for people."""
    source = bundle.provenance.source
    memory_bytes = sum(bundle.storages) + bundle.arena_bytes
    compiler = bundle.provenance.versions.get("compiler", "unknown compiler")
    weights = "drawn from a seed: for timing only" if bundle.is_seeded else "in params.npz"
    return "\n".join(
        [
            f"{bundle.model} for {bundle.provenance.target}",
            f"  source      {source.name} (SHA-256 {source.sha256})",
            f"  inputs      {_render_ports(bundle, bundle.inputs)}",
            f"  outputs     {_render_ports(bundle, bundle.outputs)}",
            f"  kernels     {len(bundle.kernels)}, launched {bundle.launch_count} times an inference",
            f"  code        {', '.join(f'{image.form} for {image.arch}' for image in bundle.images)}"
            f" ({compiler})",
            f"  weights     {len(bundle.parameters)}, {weights}",
            f"  memory      {memory_bytes / _MB:.1f} MB on the device",
            f"  files       {sum(record.size_bytes for record in bundle.files) / _MB:.1f} MB",
        ]
    )


def _render_ports(bundle: Bundle, ports: tuple[Port, ...] | tuple[Output, ...]) -> str:
    return ", ".join(f"{port.name} {bundle.tensors[port.tensor]}" for port in ports) or "none"
