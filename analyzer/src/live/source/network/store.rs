//! Reads keys of a job's store over the wire protocol of PyTorch's TCPStore (as of 2.15), which rcomm's store shares.
//!
//! A request is one opcode byte and its fields; integers are little-endian, a string is its `u64` length and its bytes.
//! A key is checked before it is read: a `get` of a missing key would wait or close the connection. Nothing is written
//! except to request dumps.
//!
//! A store that requires the job's secret gets a proof of `RCOMM_JOB_SECRET` or, if that is not set, of the user's own
//! secret, which jobs on one host use. If `RCOMM_TLS_CERT`, `RCOMM_TLS_KEY` and `RCOMM_TLS_CA` name an identity, the
//! store must use TLS, unless `RCOMM_STORE` is `open`: the variables mean the same as for the ranks.

use super::address::{HostPort, StoreStream};
use crate::live::source::SourceError;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{
    EndpointNotice, STORE_REFUSAL, STORE_TAKES_TLS, Secret, StoreCaller, Tls,
};
use std::io::{self, Read, Write};
use std::time::Instant;

// The opcodes of the protocol.
const VALIDATE: u8 = 0x00;
const SET: u8 = 0x01;
const ADD: u8 = 0x04;
const CHECK: u8 = 0x05;
const MULTI_GET: u8 = 0x0A;
const PING: u8 = 0x0D;
/// The value of a PING, which the reply repeats.
const NONCE: [u8; 4] = *b"seen";
/// The number in VALIDATE by which PyTorch's server recognizes a client.
const MAGIC: u32 = 0x3C85_F7CE;
/// The key that ranks on PyTorch's NCCL backend look for once a second.
const EXCEPTION_DUMP: &str = "exception_dump";
/// The longest value that is read, bytes: values are addresses.
const MOST_VALUE: u64 = 4096;
/// Maximum number of keys in one request.
const BATCH: u32 = 256;
/// Endpoints are searched in the newest known attempt of a job and in this many after it.
const ATTEMPT_GAP: u32 = 4;

/// The endpoints of a job's newest attempt in its store.
#[derive(Debug, Default)]
pub(super) struct StoreEndpoints {
    /// The attempt whose endpoints were found; the first that was searched if none were.
    pub(super) attempt: u32,
    /// The ranks with their endpoints, ascending.
    pub(super) notices: Vec<(Rank, EndpointNotice)>,
}

/// The endpoints of the newest attempt from `from` on that has any; the list is empty if none has. Looks
/// [`ATTEMPT_GAP`] attempts beyond `from` and beyond each attempt with endpoints; a later one is not found.
pub(super) fn endpoints(
    store: &HostPort,
    from: u32,
    deadline: Instant,
) -> io::Result<StoreEndpoints> {
    let mut newest = StoreEndpoints {
        attempt: from,
        ..StoreEndpoints::default()
    };
    let mut attempt = from;
    while attempt - newest.attempt <= ATTEMPT_GAP {
        let prefix = EndpointNotice::store_prefix(attempt);
        let found = read_by_rank(store, &prefix, None, deadline)?;
        if !found.is_empty() {
            let notice = |(rank, text): (Rank, String)| match serde_json::from_str(&text) {
                Ok(notice) => Ok((rank, notice)),
                Err(error) => {
                    let text = format!("it holds no endpoint under {prefix}{rank}: {error}");
                    Err(io::Error::new(io::ErrorKind::InvalidData, text))
                }
            };
            newest = StoreEndpoints {
                attempt,
                notices: found.into_iter().map(notice).collect::<io::Result<_>>()?,
            };
        }
        attempt += 1;
    }
    Ok(newest)
}

/// The names of the hosts of the ranks that have endpoints in the newest attempt of a job, from its store: sorted, each
/// once.
///
/// # Blocking
///
/// At most until `deadline`.
///
/// # Errors
///
/// [`SourceError`] if the store cannot be read, or no rank of its job has an endpoint.
pub fn hosts_in_store(store: &HostPort, deadline: Instant) -> Result<Vec<String>, SourceError> {
    let newest = endpoints(store, 0, deadline).map_err(|source| SourceError::Io {
        place: format!("store {store}"),
        source,
    })?;
    let notices = newest.notices.into_iter();
    let mut hosts: Vec<String> = notices.map(|(_, notice)| notice.host).collect();
    hosts.sort();
    hosts.dedup();
    if hosts.is_empty() {
        return Err(no_endpoint(store));
    }
    Ok(hosts)
}

/// Raises the alarm that ranks of rcomm watch in their store: all of them write their dumps, even if their endpoints do
/// not answer. Blocks at most until the deadline.
pub(super) fn ask_for_dumps(
    store: &HostPort,
    attempt: u32,
    cause: &str,
    deadline: Instant,
) -> io::Result<()> {
    let key = format!("rcomm/alarm/{attempt}");
    let mut stream = connect(store, deadline)?;
    let raised = add(&mut stream, &key, 0)?;
    // The cause comes first, since every rank that sees the alarm reads it.
    let cause_key = format!("rcomm/cause/{attempt}/{}", raised + 1);
    set(&mut stream, &cause_key, cause.as_bytes())?;
    add(&mut stream, &key, 1).map(drop)
}

/// Sets the flag that PyTorch's NCCL groups watch in their job's store: every rank writes its dump, waits for
/// `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`, and **ends its process**.
///
/// The flag holds the rank that timed out; -1 here, since none did.
///
/// # Blocking
///
/// At most until `deadline`.
///
/// # Errors
///
/// [`SourceError::Io`] if the store cannot be reached, or does not answer.
pub fn raise_exception_dump(store: &HostPort, deadline: Instant) -> Result<(), SourceError> {
    let raise = || {
        let mut stream = connect(store, deadline)?;
        set(&mut stream, EXCEPTION_DUMP, &(-1i32).to_le_bytes())?;
        // The answer to a second request proves that the server has read both.
        add(&mut stream, "rcomm/exception_dump", 1).map(drop)
    };
    raise().map_err(|source| SourceError::Io {
        place: format!("store {store}"),
        source,
    })
}

/// The longest reason of a refusal that is read, bytes.
const MOST_REASON: u64 = 1024;

/// Connects, and sets TLS up if this process has an identity and `RCOMM_STORE` is not `open`.
fn dial(store: &HostPort, deadline: Instant) -> io::Result<StoreStream> {
    let is_open = std::env::var("RCOMM_STORE").is_ok_and(|value| value == "open");
    let tls = match is_open {
        true => None,
        false => Tls::from_environment().map_err(io::Error::other)?,
    };
    store.connect_with(tls.as_ref(), deadline)
}

/// Connects and validates the protocol, with a proof of the secret if the store requires it.
fn connect(store: &HostPort, deadline: Instant) -> io::Result<StoreStream> {
    let mut stream = dial(store, deadline)?;
    // PyTorch's server requires the first five bytes in one piece.
    let mut greeting = vec![VALIDATE];
    greeting.extend(MAGIC.to_le_bytes());
    greeting.push(PING);
    greeting.extend(NONCE);
    stream.write_all(&greeting)?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).map_err(closed)?;
    match answer {
        NONCE => Ok(stream),
        _ if STORE_REFUSAL.starts_with(&answer) => {
            let mut reason = Vec::new();
            // The reason ends where the server closes the connection.
            let _ = stream.take(MOST_REASON).read_to_end(&mut reason);
            match String::from_utf8_lossy(&reason).contains(STORE_TAKES_TLS) {
                true => Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "it takes TLS only, and this process has none: set RCOMM_TLS_CERT, RCOMM_TLS_KEY and \
                     RCOMM_TLS_CA, as its ranks have them",
                )),
                false => prove(store, deadline),
            }
        }
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it answered as no store does: is it a job's TCPStore?",
        )),
    }
}

/// Connects to a store that requires the secret, and proves that this process knows it.
fn prove(store: &HostPort, deadline: Instant) -> io::Result<StoreStream> {
    let given = std::env::var("RCOMM_JOB_SECRET")
        .ok()
        .filter(|text| !text.trim().is_empty());
    let secret = match given {
        Some(text) => Secret::from_text(&text),
        None => Secret::of_user().map_err(io::Error::other)?,
    };
    let mut stream = dial(store, deadline)?;
    let caller = match &stream {
        StoreStream::Plain(_) => StoreCaller::new(&secret),
        StoreStream::Tls(stream, _) => StoreCaller::over_tls(&secret, stream.session()),
    };
    let caller = caller.map_err(io::Error::other)?;
    stream.write_all(&caller.hello())?;
    let mut answer = [0; StoreCaller::ANSWER_LEN];
    stream.read_exact(&mut answer).map_err(closed)?;
    let refused = || {
        io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it asks for the job's secret, and this process has another: set RCOMM_JOB_SECRET to the job's",
        )
    };
    stream.write_all(&caller.proof(&answer).ok_or_else(refused)?)?;
    let mut status = [1];
    stream.read_exact(&mut status).map_err(closed)?;
    match status {
        [0] => Ok(stream),
        _ => Err(refused()),
    }
}

/// Sets a key; the store does not reply.
fn set(stream: &mut impl Write, key: &str, value: &[u8]) -> io::Result<()> {
    let mut request = vec![SET];
    put_key(&mut request, key);
    request.extend((value.len() as u64).to_le_bytes());
    request.extend(value);
    stream.write_all(&request)
}

/// Adds to the number under a key, which is 0 if the key is new, and returns the sum.
fn add(stream: &mut (impl Read + Write), key: &str, amount: i64) -> io::Result<i64> {
    let mut request = vec![ADD];
    put_key(&mut request, key);
    request.extend(amount.to_le_bytes());
    stream.write_all(&request)?;
    let mut sum = [0; 8];
    stream.read_exact(&mut sum).map_err(closed)?;
    Ok(i64::from_le_bytes(sum))
}

/// The error for a store without endpoints.
pub(super) fn no_endpoint(store: &HostPort) -> SourceError {
    SourceError::Nothing {
        what: format!(
            "store {store} holds no endpoint ({})",
            EndpointNotice::store_key(0, 0)
        ),
        hint: "name the store of a running job whose ranks have endpoints".into(),
    }
}

/// The values of these keys, `None` for missing ones. Blocks at most until the deadline.
pub(super) fn read(
    store: &HostPort,
    keys: &[String],
    deadline: Instant,
) -> io::Result<Vec<Option<String>>> {
    let mut stream = connect(store, deadline)?;
    let mut request = Vec::new();
    for key in keys {
        request.push(CHECK);
        request.extend(1u64.to_le_bytes());
        put_key(&mut request, key);
    }
    stream.write_all(&request)?;
    let mut missing = vec![0; keys.len()];
    stream.read_exact(&mut missing).map_err(closed)?;
    let present: Vec<&String> = keys
        .iter()
        .zip(&missing)
        .filter(|(_, missing)| **missing == 0)
        .map(|(key, _)| key)
        .collect();
    if present.is_empty() {
        return Ok(vec![None; keys.len()]);
    }
    let mut request = vec![MULTI_GET];
    request.extend((present.len() as u64).to_le_bytes());
    for key in &present {
        put_key(&mut request, key);
    }
    stream.write_all(&request)?;
    let values = missing.iter().map(|missing| match missing {
        0 => read_value(&mut stream).map(Some),
        _ => Ok(None),
    });
    values.collect()
}

/// The values of `<prefix>0`, `<prefix>1`, ..., with their ranks: for all ranks of a world of this size or, if it is
/// unknown, up to the first batch without any key.
pub(super) fn read_by_rank(
    store: &HostPort,
    prefix: &str,
    world_size: Option<u32>,
    deadline: Instant,
) -> io::Result<Vec<(u32, String)>> {
    let mut found = Vec::new();
    let mut first = 0u32;
    loop {
        let end = first
            .saturating_add(BATCH)
            .min(world_size.unwrap_or(u32::MAX));
        let keys: Vec<String> = (first..end).map(|rank| format!("{prefix}{rank}")).collect();
        let values = read(store, &keys, deadline)?;
        let before = found.len();
        let values = (first..end).zip(values);
        found.extend(values.filter_map(|(rank, value)| Some((rank, value?))));
        first = end;
        let is_last_batch = found.len() == before && world_size.is_none();
        if is_last_batch || world_size.is_some_and(|size| first >= size) {
            return Ok(found);
        }
    }
}

/// Appends a key, with the `/` that clients put before it.
fn put_key(request: &mut Vec<u8>, key: &str) {
    request.extend((key.len() as u64 + 1).to_le_bytes());
    request.push(b'/');
    request.extend(key.as_bytes());
}

/// Reads a value, which must be a text of at most [`MOST_VALUE`] bytes.
fn read_value(stream: &mut impl Read) -> io::Result<String> {
    let mut length = [0; 8];
    stream.read_exact(&mut length).map_err(closed)?;
    let length = u64::from_le_bytes(length);
    if length > MOST_VALUE {
        let text = format!("it answered with a value of {length} bytes, which is not an address");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes).map_err(closed)?;
    String::from_utf8(bytes).map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "it answered with a value that is no text",
        )
    })
}

/// Replaces the error of a closed connection with one that has a clear text.
fn closed(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(
            error.kind(),
            "it closed the connection: is it a job's TCPStore?",
        ),
        _ => error,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::net::TcpListener;
    use std::time::Duration;

    /// Serves these keys, one connection at a time, until the process ends.
    pub(in crate::live::source) fn serve(keys: BTreeMap<String, Vec<u8>>) -> HostPort {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = listener
            .local_addr()
            .expect("the socket has an address")
            .port();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // An error ends only this connection.
                let _ = answer(stream, &keys);
            }
        });
        HostPort {
            host: "127.0.0.1".into(),
            port,
        }
    }

    fn answer(mut stream: std::net::TcpStream, keys: &BTreeMap<String, Vec<u8>>) -> io::Result<()> {
        fn number(stream: &mut std::net::TcpStream) -> io::Result<u64> {
            let mut bytes = [0; 8];
            stream.read_exact(&mut bytes)?;
            Ok(u64::from_le_bytes(bytes))
        }
        fn key(stream: &mut std::net::TcpStream) -> io::Result<String> {
            let length = number(stream)?;
            let mut bytes = vec![0; length as usize];
            stream.read_exact(&mut bytes)?;
            Ok(String::from_utf8(bytes).expect("keys are text"))
        }
        let mut hello = [0; 5];
        stream.read_exact(&mut hello)?;
        // Ports are reused, so a client of another server may connect.
        if hello != [0x00, 0xCE, 0xF7, 0x85, 0x3C] {
            return Ok(());
        }
        loop {
            let mut op = [0];
            stream.read_exact(&mut op)?;
            if op[0] == PING {
                let mut nonce = [0; 4];
                stream.read_exact(&mut nonce)?;
                stream.write_all(&nonce)?;
                continue;
            }
            let count = number(&mut stream)?;
            let asked: Vec<String> = (0..count)
                .map(|_| key(&mut stream))
                .collect::<io::Result<_>>()?;
            match op[0] {
                CHECK => {
                    let present = asked.iter().all(|key| keys.contains_key(key));
                    stream.write_all(&[u8::from(!present)])?;
                }
                MULTI_GET => {
                    for key in asked {
                        let value = &keys[&key];
                        stream.write_all(&(value.len() as u64).to_le_bytes())?;
                        stream.write_all(value)?;
                    }
                }
                other => panic!("unexpected request {other}"),
            }
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn missing_keys_do_not_block_the_others() {
        let keys =
            [0, 1, 3, 300].map(|rank| (format!("/p/rank{rank}"), format!("at {rank}").into()));
        let store = serve(keys.into());
        let found = read_by_rank(&store, "p/rank", None, soon()).expect("the server answers");
        let ranks: Vec<u32> = found.iter().map(|(rank, _)| *rank).collect();
        assert_eq!((ranks, found[2].1.as_str()), (vec![0, 1, 3, 300], "at 3"));
        let found = read_by_rank(&store, "p/rank", Some(2), soon()).expect("the server answers");
        assert_eq!(found.len(), 2);
        assert!(
            read_by_rank(&store, "q/rank", None, soon())
                .expect("the server answers")
                .is_empty()
        );
    }

    #[test]
    fn the_flag_for_dumps_is_a_32_bit_rank_under_pytorchs_key() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = listener
            .local_addr()
            .expect("the socket has an address")
            .port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client connects");
            let mut hello = [0; 10];
            stream
                .read_exact(&mut hello)
                .expect("the client sends its greeting");
            stream
                .write_all(&NONCE)
                .expect("the client reads the answer");
            let mut set = [0; 1 + 8 + 15 + 8 + 4];
            stream
                .read_exact(&mut set)
                .expect("the client sends a request");
            let mut add = [0; 1 + 8 + 21 + 8];
            stream
                .read_exact(&mut add)
                .expect("the client sends a request");
            stream
                .write_all(&1i64.to_le_bytes())
                .expect("the client reads the answer");
            set
        });
        let host = "127.0.0.1".into();
        raise_exception_dump(&HostPort { host, port }, soon()).expect("the server answers");
        let sent = server.join().expect("no thread panics");
        let mut expected = vec![SET];
        expected.extend(15u64.to_le_bytes());
        expected.extend(b"/exception_dump");
        expected.extend(4u64.to_le_bytes());
        expected.extend([0xFF; 4]);
        assert_eq!(sent[..], expected[..]);
    }

    #[test]
    fn a_value_that_is_no_address_and_a_server_that_is_no_store_are_errors() {
        let store = serve([("/k0".to_owned(), vec![b'x'; 5000])].into());
        let error = read(&store, &["k0".into()], soon())
            .expect_err("an answer that is too long is an error");
        assert!(error.to_string().contains("5000 bytes"), "{error}");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = listener
            .local_addr()
            .expect("the socket has an address")
            .port();
        let close = std::thread::spawn(move || drop(listener.accept()));
        let store = HostPort {
            host: "127.0.0.1".into(),
            port,
        };
        assert!(read(&store, &["k0".into()], soon()).is_err());
        close.join().expect("the thread closes the connection");
    }
}
