//! Two socket options that `rustix` does not have: the system's state of a TCP connection, and the limit of the pause
//! between its retransmissions.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// The state of a connection, according to the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SocketHealth {
    /// How long ago the last bytes or the last acknowledgement arrived.
    pub(crate) silent_for: Duration,
    /// Packets that were sent and not acknowledged.
    pub(crate) unacknowledged: u32,
}

/// Returns the state of a connection; `None` if it is not open in both directions, or if the system does not report it.
pub(crate) fn health(socket: &TcpStream) -> Option<SocketHealth> {
    // The kernel's `TCP_ESTABLISHED`.
    const ESTABLISHED: u8 = 1;
    let info = tcp_info(socket).filter(|info| info.tcpi_state == ESTABLISHED)?;
    Some(SocketHealth {
        silent_for: last_sign_of(&info),
        unacknowledged: info.tcpi_unacked,
    })
}

/// How long ago the last bytes or the last acknowledgement arrived, also on a connection that is no longer open; `None`
/// if the system does not report it.
pub(crate) fn last_sign(socket: &TcpStream) -> Option<Duration> {
    tcp_info(socket).as_ref().map(last_sign_of)
}

fn last_sign_of(info: &libc::tcp_info) -> Duration {
    let silent_ms = info.tcpi_last_data_recv.min(info.tcpi_last_ack_recv);
    Duration::from_millis(silent_ms.into())
}

fn tcp_info(socket: &TcpStream) -> Option<libc::tcp_info> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `info`, of which the system writes at most `length` bytes.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    // SAFETY: `info` was zeroed, and every field is a number, for which any bit pattern is valid.
    (done == 0).then(|| unsafe { info.assume_init() })
}

/// Limits the pause between two retransmissions of unacknowledged data. `pause` is limited to the range that the kernel
/// accepts: one second to two minutes.
///
/// # Errors
/// Those of the system, such as a kernel that does not have the option.
pub(crate) fn limit_retransmission_pause(socket: &TcpStream, pause: Duration) -> io::Result<()> {
    // From the kernel's headers; `libc` does not define it.
    const TCP_RTO_MAX_MS: libc::c_int = 44;
    let ms = libc::c_int::try_from(pause.as_millis()).unwrap_or(120_000);
    let ms = ms.clamp(1_000, 120_000);
    // SAFETY: the pointer and the length describe `ms`, which the system only reads.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            TCP_RTO_MAX_MS,
            (&raw const ms).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{Shutdown, TcpListener};
    use std::time::Instant;

    #[test]
    fn health_shows_when_bytes_arrived_and_is_none_after_a_shutdown() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let sent = Instant::now();
        far.write_all(&[1]).unwrap();
        near.peek(&mut [0]).unwrap();
        let silent_for = health(&near).unwrap().silent_for;
        // The system counts in ticks of at most ten milliseconds.
        let most = sent.elapsed() + Duration::from_millis(50);
        assert!(silent_for <= most, "{silent_for:?} of {most:?}");
        near.shutdown(Shutdown::Both).unwrap();
        assert_eq!(health(&near), None);
    }
}
