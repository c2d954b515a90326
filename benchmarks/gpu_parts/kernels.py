"""What TensorFlow's profiler has seen on a GPU."""

import re


def kernels_of(file):
    """Yield the time of a profile's GPU, and its kernels that take longest; a generator of dicts."""
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
                begin = line.timestamp_ns * 1000 + event.offset_ps
                spans.append((begin, begin + event.duration_ps))
                name = re.sub(r"_\d+(?=$|_)", "", name)
                total = by_name.setdefault(name, [0, 0])
                total[0] += event.duration_ps * 1e-9
                total[1] += 1
                if "Memcpy" in name:
                    copies[name] = copies.get(name, 0) + 1
        busy, last = 0, 0
        for begin, end in sorted(spans):
            busy += max(0, end - max(begin, last))
            last = max(last, end)
        whole = (max(e for _, e in spans) - min(b for b, _ in spans)) if spans else 0
        yield {
            "kernels": len(spans),
            "milliseconds": whole * 1e-9,
            "idle_share": 1 - busy / whole if whole else None,
            "copies": copies,
        }
        for name, (ms, count) in sorted(by_name.items(), key=lambda item: -item[1][0])[:40]:
            yield {"kernel": name[:90], "ms": round(ms, 3), "count": count}
