//! A channel whose other end sends the fuzzer's bytes.

use super::channel::{MAX_KEPT_BYTES, PeerChannel, WaitingReceive};
use super::frame::{FRAME_BYTES, Frame, MAX_EAGER_BYTES};
use super::request::{Request, Stage};
use crate::transport::tcp::TcpChannel;
use crate::transport::{Channel, TcpConnection};
use rcomm_recorder::model::DType;
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};

/// The receives that are posted on the channel: tag, type, size in bytes, and whether they receive from any peer.
const RECEIVES: [(u32, DType, usize, bool); 5] = [
    (0, DType::U8, 16, false),
    (0, DType::U8, 0, true),
    (1, DType::F32, 8, false),
    (1, DType::F32, 80_000, false),
    (7, DType::I64, 64, true),
];

/// Lets the receives read `bytes`: they must end, fail or wait, and the channel must not keep more bytes than its limit
/// and one message.
pub fn receive_any_bytes(bytes: &[u8]) -> std::io::Result<()> {
    let head = bytes.first_chunk::<FRAME_BYTES>();
    if let Some(frame) = head.and_then(Frame::decode) {
        assert_eq!(Frame::decode(&frame.encode()), Some(frame));
    }
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let mut there = TcpStream::connect(listener.local_addr()?)?;
    let (here, _) = listener.accept()?;
    here.set_nonblocking(true)?;
    there.write_all(bytes)?;
    there.shutdown(Shutdown::Write)?;

    let mut channel = PeerChannel::new();
    channel.channel = Some(Channel::Tcp(TcpChannel::new(vec![TcpConnection::plain(
        here,
    )])?));
    // This rank has offered one message, which was not answered.
    channel.offered.push(1);
    let mut requests = Vec::new();
    for (id, (tag, dtype, len, from_any)) in (10..).zip(RECEIVES) {
        channel.waiting.push_back(WaitingReceive {
            receive: id,
            tag,
            from_any,
        });
        let peer = (!from_any).then_some(0);
        let stage = Stage::Receive { peer };
        requests.push((Request::new(id, tag, dtype, stage), vec![0u8; len]));
    }
    loop {
        let mut has_advanced = false;
        for (request, buffer) in &mut requests {
            if !matches!(
                request.stage,
                Stage::Receive { .. } | Stage::Receiving { .. }
            ) {
                continue;
            }
            let result = channel.receive(request, buffer, 0, 1);
            match request.keep_mismatch(result) {
                Ok(advanced_now) => has_advanced |= advanced_now,
                // An error ends the group.
                Err(_) => return Ok(()),
            }
            assert!(channel.kept_bytes <= MAX_KEPT_BYTES + MAX_EAGER_BYTES + FRAME_BYTES);
        }
        if !has_advanced {
            return Ok(());
        }
    }
}
