//! Runs a program that passes packets between two network interfaces, each packet late, for kernels without netem.

use anyhow::{Context, ensure};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// With the arguments `off NAME`, turns the offloads of an interface off: its packets then have their checksums and are
/// no larger than the link takes. With the names of two interfaces, passes packets between them, each 40 ms late, in
/// order.
const SCRIPT: &str = r#"
import array, collections, fcntl, select, socket, struct, sys, time
DELAY, SIOCETHTOOL = 0.04, 0x8946
# ETHTOOL_STXCSUM, _STSO, _SGSO, _SGRO
OFFLOADS = (0x17, 0x1f, 0x24, 0x2c)
if sys.argv[1] == "off":
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for command in OFFLOADS:
        value = array.array("I", [command, 0])
        request = struct.pack("16sP", sys.argv[2].encode(), value.buffer_info()[0])
        fcntl.ioctl(s, SIOCETHTOOL, request)
    sys.exit()
def port(name):
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    s.bind((name, 0))
    return s
a, b = map(port, sys.argv[1:3])
to, late = {a: b, b: a}, collections.deque()
print("ready", flush=True)
while True:
    wait = max(0, late[0][0] - time.monotonic()) if late else None
    for s in select.select([a, b], [], [], wait)[0]:
        frame, where = s.recvfrom(1 << 16)
        if where[2] != socket.PACKET_OUTGOING:
            late.append((time.monotonic() + DELAY, to[s], frame))
    while late and late[0][0] <= time.monotonic():
        _, out, frame = late.popleft()
        try:
            out.send(frame)
        except OSError:
            pass  # As a packet that is lost.
"#;

/// A relay that runs until this value is dropped.
pub(crate) struct Relay(Child);

impl Relay {
    /// Starts a relay between two interfaces of a network namespace, and waits until it works.
    ///
    /// # Errors
    /// There is no `ip` or no Python here, or this user may not read packets.
    pub(crate) fn start(namespace: &str, between: [&str; 2]) -> anyhow::Result<Self> {
        let mut command = python(namespace, &between);
        let started = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut relay = Self(started.context("cannot run ip")?);
        let mut line = String::new();
        if let Some(output) = relay.0.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        ensure!(
            line.trim() == "ready",
            "no netem in this kernel, and no Python that may pass packets on"
        );
        Ok(relay)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The program may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes the host of this namespace send only complete packets: a relay cannot pass on others.
pub(crate) fn complete_packets(namespace: &str) -> anyhow::Result<()> {
    let done = python(namespace, &["off", "eth0"]).output();
    let done = done.context("cannot run ip")?;
    let error = String::from_utf8_lossy(&done.stderr);
    let last = error.lines().last().unwrap_or_default();
    ensure!(
        done.status.success(),
        "no netem in this kernel, and no relay: {last}"
    );
    Ok(())
}

fn python(namespace: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("ip");
    command
        .args(["netns", "exec", namespace, "python3", "-c", SCRIPT])
        .args(arguments)
        .stdin(Stdio::null());
    command
}
