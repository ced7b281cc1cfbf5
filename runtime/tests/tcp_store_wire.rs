//! The TCPStore protocol, byte by byte over raw sockets: what PyTorch's clients rely on.

#![allow(clippy::unwrap_used)]

use rcomm::store::{Store, StoreAccess, StoreLimits, TcpStore, TcpStoreServer};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(30);
/// The first message of a connection: its opcode and a magic number.
const VALIDATE: [u8; 5] = [0x00, 0xCE, 0xF7, 0x85, 0x3C];
/// Maximum length of a key as it is sent, in bytes.
const MAX_KEY: usize = 8192;
/// Maximum length of a value, in bytes.
const MAX_VALUE: usize = 8 << 20;

fn server() -> TcpStoreServer {
    TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap()
}

fn dial(server: &TcpStoreServer) -> TcpStream {
    let socket = TcpStream::connect(server.local_addr()).unwrap();
    socket.set_nodelay(true).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// A client that sends and receives raw bytes.
struct Raw(TcpStream);

impl Raw {
    fn new(server: &TcpStoreServer) -> Self {
        let mut raw = Self(dial(server));
        raw.send(&VALIDATE);
        raw
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    #[track_caller]
    fn expect(&mut self, reply: &[u8]) {
        let mut found = vec![0; reply.len()];
        self.0.read_exact(&mut found).unwrap();
        assert_eq!(found, reply);
    }

    #[track_caller]
    fn ask(&mut self, request: &[u8], reply: &[u8]) {
        self.send(request);
        self.expect(reply);
    }

    /// Asserts that no reply is pending: the next bytes from the server are the reply to a PING.
    #[track_caller]
    fn expect_nothing(&mut self) {
        self.ask(b"\x0Dnext", b"next");
    }

    #[track_caller]
    fn expect_closed(&mut self) {
        let mut byte = [0];
        match self.0.read(&mut byte) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("the connection is open: {other:?} {byte:?}"),
        }
    }
}

/// A string as the protocol sends it: its length, then its bytes.
fn text(string: &[u8]) -> Vec<u8> {
    [&(string.len() as u64).to_le_bytes()[..], string].concat()
}

/// A number as the protocol sends it.
fn int(number: i64) -> Vec<u8> {
    number.to_le_bytes().to_vec()
}

/// A request: its opcode, then its fields.
fn op(code: u8, fields: &[Vec<u8>]) -> Vec<u8> {
    [vec![code], fields.concat()].concat()
}

fn set(key: &[u8], value: &[u8]) -> Vec<u8> {
    op(0x01, &[text(key), text(value)])
}

fn get(key: &[u8]) -> Vec<u8> {
    op(0x03, &[text(key)])
}

/// A request whose field is a list of keys.
fn keyed(code: u8, keys: &[&[u8]]) -> Vec<u8> {
    let strings: Vec<u8> = keys.iter().flat_map(|key| text(key)).collect();
    op(code, &[int(keys.len() as i64), strings])
}

fn wait(keys: &[&[u8]]) -> Vec<u8> {
    keyed(0x06, keys)
}

fn push(key: &[u8], value: &[u8]) -> Vec<u8> {
    op(0x0E, &[text(key), text(value)])
}

fn barrier(key: &[u8], world: i64) -> Vec<u8> {
    op(0x12, &[text(key), int(world)])
}

/// Requests with every opcode except that of the first message, each with the expected reply.
fn conversation() -> Vec<(Vec<u8>, Vec<u8>)> {
    let none = Vec::new;
    vec![
        (
            op(0x0D, &[b"\x01\x02\x03\x04".to_vec()]),
            b"\x01\x02\x03\x04".to_vec(),
        ),
        (op(0x07, &[]), int(0)),
        (set(b"/a", b"one"), none()),
        (get(b"/a"), text(b"one")),
        (get(b"/missing"), text(b"")),
        (op(0x04, &[text(b"/n"), int(-2)]), int(-2)),
        (op(0x04, &[text(b"/n"), int(12)]), int(10)),
        (get(b"/n"), text(b"10")),
        (keyed(0x05, &[b"/a", b"/n"]), vec![0]),
        (keyed(0x05, &[b"/a", b"/x"]), vec![1]),
        (keyed(0x05, &[]), vec![0]),
        (wait(&[b"/a", b"/n"]), vec![0]),
        (wait(&[]), vec![0]),
        (op(0x09, &[text(b"/a"), text(b" two")]), none()),
        (op(0x09, &[text(b"/new"), text(b"x")]), none()),
        (
            keyed(0x0A, &[b"/a", b"/x", b"/new"]),
            [text(b"one two"), text(b""), text(b"x")].concat(),
        ),
        (keyed(0x0A, &[]), none()),
        (
            op(
                0x0B,
                &[int(2), text(b"/m"), text(b"1"), text(b""), text(b"2")],
            ),
            none(),
        ),
        (get(b""), text(b"2")),
        (op(0x02, &[text(b"/c"), text(b"x"), text(b"y")]), text(b"x")),
        (keyed(0x05, &[b"/c"]), vec![1]),
        (op(0x02, &[text(b"/c"), text(b""), text(b"y")]), text(b"y")),
        (op(0x02, &[text(b"/c"), text(b"y"), text(b"z")]), text(b"z")),
        (op(0x02, &[text(b"/c"), text(b"y"), text(b"w")]), text(b"z")),
        (op(0x08, &[text(b"/c")]), int(1)),
        (op(0x08, &[text(b"/c")]), int(0)),
        (op(0x0C, &[]), vec![1]),
        (op(0x10, &[text(b"/q")]), int(0)),
        (op(0x0F, &[text(b"/q")]), int(0)),
        (push(b"/q", b"first"), none()),
        (push(b"/q", b""), none()),
        (op(0x10, &[text(b"/q")]), int(2)),
        (keyed(0x05, &[b"/q"]), vec![0]),
        (op(0x0F, &[text(b"/q")]), [int(2), text(b"first")].concat()),
        (op(0x0F, &[text(b"/q")]), [int(1), text(b"")].concat()),
        (keyed(0x05, &[b"/q"]), vec![1]),
        (op(0x07, &[]), int(5)),
        (barrier(b"/b", 1), vec![0]),
        (get(b"/b"), text(b"1")),
        (op(0x08, &[text(b"/b")]), int(1)),
        (op(0x08, &[text(b"/a")]), int(1)),
        (op(0x08, &[text(b"/n")]), int(1)),
        (op(0x08, &[text(b"/m")]), int(1)),
        (op(0x08, &[text(b"")]), int(1)),
        (op(0x11, &[]), [int(1), text(b"/new")].concat()),
    ]
}

#[test]
fn every_opcode_gets_its_reply() {
    let server = server();
    let mut raw = Raw::new(&server);
    for (request, reply) in conversation() {
        raw.ask(&request, &reply);
    }
    raw.expect_nothing();
}

#[test]
fn requests_may_arrive_byte_by_byte_or_all_at_once() {
    let stream: Vec<u8> = conversation()
        .into_iter()
        .flat_map(|(request, _)| request)
        .collect();
    let replies: Vec<u8> = conversation()
        .into_iter()
        .flat_map(|(_, reply)| reply)
        .collect();
    for piece_len in [1, 7, 64, stream.len()] {
        let server = server();
        let mut raw = Raw(dial(&server));
        for bytes in [&VALIDATE, stream.as_slice()].concat().chunks(piece_len) {
            raw.send(bytes);
        }
        raw.expect(&replies);
        raw.expect_nothing();
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = server();
    let mut raw = Raw::new(&server);
    let requests: Vec<u8> = (0..10_000)
        .flat_map(|_| op(0x04, &[text(b"/n"), int(1)]))
        .collect();
    let mut sender = raw.0.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| sender.write_all(&requests).unwrap());
        for count in 1..=10_000 {
            raw.expect(&int(count));
        }
    });
}

#[test]
fn client_without_a_valid_first_message_is_disconnected() {
    let server = server();
    let refused: [&[u8]; 6] = [
        b"\x0D1234",
        b"\x00\x01\x02\x03\x04",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x13",
        b"\xFF",
        b"\x00\xCE\xF7\x85\x3C\x00\xCE\xF7\x85\x3C",
    ];
    for bytes in refused {
        let mut raw = Raw(dial(&server));
        raw.send(bytes);
        raw.expect_closed();
    }
    Raw::new(&server).expect_nothing();
}

#[test]
fn a_request_at_a_limit_is_served_and_one_above_ends_the_connection() {
    let server = server();
    let mut raw = Raw::new(&server);
    let key = vec![b'k'; MAX_KEY];
    let value = vec![b'v'; MAX_VALUE];
    raw.send(&set(&key, &value));
    raw.ask(&get(&key), &text(&value));

    let count = |code: u8, count: u64| [vec![code], count.to_le_bytes().to_vec()].concat();
    let length =
        |code: u8, length: usize| [vec![code], (length as u64).to_le_bytes().to_vec()].concat();
    let refused = [
        length(0x01, MAX_KEY + 1),
        [length(0x01, 1), b"k".to_vec(), int(MAX_VALUE as i64 + 1)].concat(),
        [length(0x0E, 1), b"k".to_vec(), int(-1)].concat(),
        count(0x05, 131_073),
        count(0x06, u64::MAX),
        count(0x0A, 131_073),
        count(0x0B, u64::MAX),
        vec![0x13],
        VALIDATE.to_vec(),
    ];
    for bytes in refused {
        let mut raw = Raw::new(&server);
        raw.send(&[b"\x0Dping".as_slice(), &bytes].concat());
        raw.expect(b"ping");
        raw.expect_closed();
    }
    // The largest allowed number of keys is accepted.
    let mut raw = Raw::new(&server);
    let keys = vec![&b""[..]; 131_072];
    raw.ask(&keyed(0x05, &keys), &[1]);
}

#[test]
fn large_value_in_small_pieces_is_stored() {
    let server = server();
    let mut raw = Raw::new(&server);
    let value: Vec<u8> = (0..MAX_VALUE).map(|index| (index / 7) as u8).collect();
    for bytes in set(b"/large", &value).chunks(1500) {
        raw.send(bytes);
    }
    raw.ask(&get(b"/large"), &text(&value));
}

#[test]
fn add_to_a_value_that_is_no_number_or_overflows_is_refused() {
    let server = server();
    for value in [&b"abc"[..], b"", b"9223372036854775807"] {
        let mut raw = Raw::new(&server);
        raw.send(&set(b"/t", value));
        raw.send(&op(0x04, &[text(b"/t"), int(1)]));
        raw.expect_closed();
        let mut raw = Raw::new(&server);
        raw.ask(&get(b"/t"), &text(value));
    }
}

#[test]
fn wait_ends_when_the_last_key_is_set() {
    let server = server();
    let (mut waiter, mut setter) = (Raw::new(&server), Raw::new(&server));
    waiter.send(&wait(&[b"/a", b"/b", b"/a"]));
    waiter.expect_nothing();
    setter.send(&set(b"/a", b""));
    setter.expect_nothing();
    waiter.expect_nothing();
    // A key that was deleted after it was set still counts as set for this wait.
    setter.ask(&op(0x08, &[text(b"/a")]), &int(1));
    setter.ask(&op(0x04, &[text(b"/b"), int(1)]), &int(1));
    waiter.expect(&[0]);
    waiter.expect_nothing();
}

#[test]
fn every_request_that_makes_a_key_wakes_its_waiters() {
    let server = server();
    type MakeRequest = fn(&[u8]) -> Vec<u8>;
    let requests: [MakeRequest; 7] = [
        |key| set(key, b""),
        |key| op(0x02, &[text(key), text(b""), text(b"v")]),
        |key| op(0x04, &[text(key), int(1)]),
        |key| op(0x09, &[text(key), text(b"")]),
        |key| {
            op(
                0x0B,
                &[int(2), text(b"/j"), text(b""), text(key), text(b"")],
            )
        },
        |key| push(key, b""),
        |key| barrier(key, 2),
    ];
    for (index, request) in requests.into_iter().enumerate() {
        let key = format!("/k{index}").into_bytes();
        let mut waiter = Raw::new(&server);
        waiter.send(&wait(&[&key]));
        waiter.expect_nothing();
        Raw::new(&server).send(&request(&key));
        waiter.expect(&[0]);
    }
}

#[test]
fn connection_can_set_the_key_that_it_waits_for() {
    let server = server();
    let mut raw = Raw::new(&server);
    let requests = [wait(&[b"/k"]), set(b"/k", b"v"), b"\x0Dpost".to_vec()].concat();
    raw.ask(&requests, b"\0post");
}

#[test]
fn request_after_a_wait_is_answered_before_it() {
    let server = server();
    let mut raw = Raw::new(&server);
    raw.ask(&[wait(&[b"/k"]), get(b"/k")].concat(), &text(b""));
    Raw::new(&server).send(&set(b"/k", b"v"));
    raw.expect(&[0]);
    raw.ask(&get(b"/k"), &text(b"v"));
}

#[test]
fn cancelled_wait_is_answered_once() {
    let server = server();
    let (mut waiter, mut other) = (Raw::new(&server), Raw::new(&server));
    for request in [wait(&[b"/a", b"/b"]), barrier(b"/bar", 3)] {
        waiter.send(&request);
        waiter.ask(&[0x0C], &[1]);
    }
    other.send(&set(b"/a", b""));
    other.send(&set(b"/b", b""));
    other.expect_nothing();
    waiter.expect_nothing();
    // The cancelled arrival still counts, as PyTorch counts it.
    other.send(&barrier(b"/bar", 3));
    other.expect_nothing();
    waiter.ask(&barrier(b"/bar", 3), &[0]);
    other.expect(&[0]);
}

#[test]
fn second_wait_while_one_is_pending_is_refused() {
    let server = server();
    for second in [wait(&[b"/b"]), barrier(b"/c", 2)] {
        let mut raw = Raw::new(&server);
        raw.send(&wait(&[b"/a"]));
        raw.send(&second);
        raw.expect_closed();
    }
}

#[test]
fn waiter_that_was_disconnected_is_not_woken() {
    let server = server();
    let mut stays = Raw::new(&server);
    for _ in 0..3 {
        let mut leaves = Raw::new(&server);
        leaves.send(&wait(&[b"/q"]));
        leaves.expect_nothing();
        leaves.send(b"\xFF");
        leaves.expect_closed();
    }
    stays.send(&wait(&[b"/q"]));
    stays.expect_nothing();
    // One pushed value wakes one waiter, which must not be a connection that was closed.
    Raw::new(&server).send(&push(b"/q", b"v"));
    stays.expect(&[0]);
}

#[test]
fn each_push_wakes_one_waiter_and_a_key_wakes_all() {
    let server = server();
    let mut waiters: Vec<Raw> = (0..3).map(|_| Raw::new(&server)).collect();
    for waiter in &mut waiters {
        waiter.send(&wait(&[b"/q"]));
        waiter.expect_nothing();
    }
    let mut other = Raw::new(&server);
    other.send(&push(b"/q", b"v"));
    waiters[0].expect(&[0]);
    waiters[1].expect_nothing();
    waiters[2].expect_nothing();
    other.send(&set(b"/q", b""));
    waiters[1].expect(&[0]);
    waiters[2].expect(&[0]);
    other.ask(&op(0x07, &[]), &int(1));
}

#[test]
fn barrier_ends_for_all_ranks_and_for_later_arrivals_at_once() {
    let server = server();
    let mut ranks: Vec<Raw> = (0..4).map(|_| Raw::new(&server)).collect();
    for rank in &mut ranks[..3] {
        rank.send(&barrier(b"/b", 4));
        rank.expect_nothing();
    }
    ranks[3].send(&barrier(b"/b", 4));
    for rank in &mut ranks {
        rank.expect(&[0]);
    }
    Raw::new(&server).ask(&barrier(b"/b", 4), &[0]);
}

#[test]
fn client_that_does_not_read_does_not_block_others_and_is_served_later() {
    let server = server();
    let mut slow = Raw::new(&server);
    let value = vec![b'x'; 1 << 20];
    slow.send(&set(b"/v", &value));
    // 300 MiB of replies that the client does not read at first.
    slow.send(&get(b"/v").repeat(300));
    slow.send(b"\x0Dlast");
    let mut other = Raw::new(&server);
    other.expect_nothing();
    for _ in 0..300 {
        slow.expect(&text(&value));
    }
    slow.expect(b"last");
}

#[test]
fn server_that_stops_closes_its_connections() {
    let server = server();
    let mut raw = Raw::new(&server);
    raw.send(&wait(&[b"/never"]));
    raw.expect_nothing();
    drop(server);
    raw.expect_closed();
}

#[test]
fn server_on_all_addresses_serves_ipv4_and_ipv6_clients() {
    let server = TcpStoreServer::bind_any(0, &StoreAccess::Open, StoreLimits::default()).unwrap();
    let ipv4_client = TcpStore::connect("127.0.0.1", server.port(), LONG).unwrap();
    ipv4_client.set("k", b"v").unwrap();
    match TcpStore::connect("::1", server.port(), Duration::from_secs(1)) {
        Ok(ipv6_client) => assert_eq!(ipv6_client.get("k", LONG).unwrap(), b"v"),
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "skipped: this host has no IPv6 loopback: {error}"
            );
        }
    }
}

#[test]
fn thousand_clients_wait_for_one_key() {
    let server = server();
    let mut clients: Vec<Raw> = (0..1024).map(|_| Raw::new(&server)).collect();
    for client in &mut clients {
        client.send(&wait(&[b"/go"]));
        client.expect_nothing();
    }
    Raw::new(&server).send(&set(b"/go", b""));
    for client in &mut clients {
        client.expect(&[0]);
    }
    for client in &mut clients {
        client.send(&barrier(b"/b", 1024));
    }
    for client in &mut clients {
        client.expect(&[0]);
    }
}

#[test]
fn arbitrary_bytes_do_not_stop_the_server() {
    use proptest::collection::vec;
    use proptest::prelude::*;
    let server = server();
    let near_requests = prop_oneof![
        // Small numbers are likely to be valid opcodes, counts and lengths.
        vec(
            prop_oneof![4 => Just(0_u8), 2 => 0_u8..20, 1 => any::<u8>()],
            0..400
        ),
        vec(0..conversation().len(), 0..12).prop_map(|picks| {
            let conversation = conversation();
            picks
                .into_iter()
                .flat_map(|index| conversation[index].0.clone())
                .collect()
        }),
    ];
    proptest!(ProptestConfig::with_cases(300), |(
        bytes in near_requests,
        cut in any::<prop::sample::Index>(),
        piece_len in 1_usize..50,
    )| {
        let mut raw = Raw(dial(&server));
        let stream = [&VALIDATE[..], &bytes[..cut.index(bytes.len() + 1)]].concat();
        for piece in stream.chunks(piece_len) {
            // The server may already have closed the connection because of an invalid request.
            if raw.0.write_all(piece).is_err() {
                break;
            }
        }
        drop(raw);
        Raw::new(&server).expect_nothing();
    });
}
