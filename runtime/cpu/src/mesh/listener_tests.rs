//! Tests of the listener.

use super::*;
use rcomm_recorder::publish::Secret;
use rustix::event::EventfdFlags;

const GROUP: u64 = 7;

/// Performs the handshake of rank 3 with rank 1 at this port; returns the last answer.
fn shake_hands(port: u16, dialer: &Identity) -> [u8; 4] {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(HANDSHAKE_TIME / 2)).unwrap();
    let handshake = Handshake {
        kind: ChannelKind::P2p,
        from: 3,
        to: 1,
        group: GROUP,
        stream: 0,
    };
    let first = handshake.encode(dialer, &[7; 32]);
    stream.write_all(&first).unwrap();
    let mut answer = [0; ANSWER_LEN];
    stream.read_exact(&mut answer).unwrap();
    let nonce = <[u8; 32]>::try_from(&answer[4..36]).unwrap();
    let proof = dialer.prove(End::Dialer, &first, &nonce);
    stream.write_all(&proof).unwrap();
    let mut last = [0; 4];
    stream.read_exact(&mut last).unwrap();
    last
}

#[test]
fn idle_connections_make_room_for_ranks_and_the_oldest_goes_first() {
    let secret = Secret::from_text("secret");
    let identity = |rank| Identity::new(rank, 4, "job", &secret);
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    tcp.set_nonblocking(true).unwrap();
    let port = tcp.local_addr().unwrap().port();
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let wake = Arc::new(rustix::event::eventfd(0, flags).unwrap());
    let shared = Arc::new(ListenerState::new());
    let mut listener = Listener::new(
        identity(1),
        None,
        shared.clone(),
        vec![tcp],
        None,
        wake.clone(),
    );
    listener.limits = Limits {
        total: 8,
        per_host: 4,
        least_time: Duration::from_millis(50),
    };
    let thread = std::thread::spawn(move || listener.work());
    // Twice as many as there is room for in all.
    let idle = |_| TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut idle: Vec<TcpStream> = (0..16).map(idle).collect();
    let welcome = shake_hands(port, &identity(3));
    assert_eq!(welcome, Decision::Welcome.to_bytes());
    let id = ChannelId {
        group: GROUP,
        kind: ChannelKind::P2p,
        peer: 3,
        stream: 0,
    };
    assert!(lock(&shared.arrived).channels.contains_key(&id));
    assert!(shared.refused.load(Ordering::Relaxed) >= 9);
    for socket in &idle {
        socket.set_nonblocking(true).unwrap();
    }
    let is_open = |socket: &mut TcpStream| drop_received(socket);
    assert!(!is_open(&mut idle[0]));
    assert!(is_open(&mut idle[15]));
    shared.stop.store(true, Ordering::Release);
    rustix::io::write(&*wake, &1_u64.to_ne_bytes()).unwrap();
    thread.join().unwrap();
}
