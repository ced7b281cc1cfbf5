# Compares the host's cost of a call, of `device_bench --host` (first file), with PyTorch's, of host_cost.py (second
# file), for the same number of bytes. Prints both; ends with 1 if ours is more than half, or if there is nothing to
# compare.
FNR == 1 { file++ }
file == 1 && match($0, /[0-9]+ bytes: host ns of a call:/) {
    bytes = substr($0, RSTART) + 0
    sub(/.*ProcessGroup /, "")
    ours[bytes] = $0 + 0
}
file == 2 && match($0, /[0-9]+ bytes: host /) {
    bytes = substr($0, RSTART) + 0
    sub(/.*bytes: host /, "")
    if (bytes in ours) {
        seen = 1
        printf "%d ns, PyTorch %d ns", ours[bytes], $0
        if (2 * ours[bytes] > $0 + 0) bad = 1
    }
}
END { exit bad || !seen }
