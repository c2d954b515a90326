"""Read the GPU kernels of a TensorFlow profile."""

import re


def read_kernels(file):
    """Yield dicts: the total and idle time of each GPU, then its 40 slowest kernels."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    for plane in space.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        spans, by_name, copies = [], {}, {}
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                start = line.timestamp_ns * 1000 + event.offset_ps
                spans.append((start, start + event.duration_ps))
                name = re.sub(r"_\d+(?=$|_)", "", name)
                total = by_name.setdefault(name, [0, 0])
                total[0] += event.duration_ps * 1e-9
                total[1] += 1
                if "Memcpy" in name:
                    copies[name] = copies.get(name, 0) + 1
        busy, last = 0, 0
        for start, end in sorted(spans):
            busy += max(0, end - max(start, last))
            last = max(last, end)
        total_ps = (max(e for _, e in spans) - min(b for b, _ in spans)) if spans else 0
        yield {
            "kernels": len(spans),
            "milliseconds": total_ps * 1e-9,
            "idle_share": 1 - busy / total_ps if total_ps else None,
            "copies": copies,
        }
        for name, (ms, count) in sorted(by_name.items(), key=lambda item: -item[1][0])[:40]:
            yield {"kernel": name[:90], "ms": round(ms, 3), "count": count}
