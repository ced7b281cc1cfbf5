//! The endpoints of ranks, also of ranks that hang, answer requests for records, peers, waits, threads and handlers.
#![allow(clippy::unwrap_used)]

use rcomm::config::EndpointChoice;
use rcomm::{EndpointAddress, EndpointToken, Secret, WaitStatistics};
use rcomm_analyzer::source::{EndpointSource, Seen};
use rcomm_analyzer::{Policy, Source, analyze};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, EndpointClient, OwnThread};
use rcomm_tests::fault::Fault;
use rcomm_tests::process::{CULPRIT, Job, wait_until};
use rcomm_tests::world::{Carrier, on_threads};
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

const RANKS: u32 = 4;

/// A deadline for a request.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Polls the rank at this address, and through it all others, until the report names the culprit and its last phase.
fn ask_until_found(address: EndpointAddress) {
    let mut source = EndpointSource::new(vec![address], None);
    let mut records: BTreeMap<Rank, Dump> = BTreeMap::new();
    wait_until("a verdict from the endpoints", || {
        for seen in source.poll(soon()).ok()?.observations {
            if let Seen::Changed(dump) = seen.seen {
                records.insert(seen.rank, *dump);
            }
        }
        let dumps: Vec<Dump> = records.values().cloned().collect();
        let report = analyze(&dumps, &Policy::default());
        // Until all ranks are stuck the report is that of a running job.
        let first = report.findings.first()?;
        // At first the culprit may still be in the phase before.
        let found = first.seq == Some(4)
            && first.culprit_ranks == [CULPRIT]
            && first.sentence.contains("load data");
        (found && dumps.len() == RANKS as usize).then_some(())
    });
}

#[test]
fn ranks_whose_main_threads_are_stuck_answer_at_their_endpoints() {
    let change = |_: u32, command: &mut std::process::Command| {
        command.env("RCOMM_TIMEOUT_MS", "600000");
    };
    let program = env!("CARGO_BIN_EXE_rank");
    let job = Job::start(program, RANKS, Fault::StopJoining, change);
    let socket = job.ring_path(1).with_extension("sock");
    wait_until("the socket of rank 1", || socket.exists().then_some(()));
    ask_until_found(EndpointAddress::Unix(socket.clone()));
    assert!(job.dumps().is_empty(), "a rank has timed out");
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_job_that_turns_endpoints_off_has_none() {
    let change = |_: u32, command: &mut std::process::Command| {
        command.env("RCOMM_ENDPOINT", "off");
    };
    let program = env!("CARGO_BIN_EXE_rank");
    let mut job = Job::start(program, RANKS, Fault::StopJoining, change);
    job.wait(0);
    assert!(job.ring_path(CULPRIT).exists());
    assert!(!job.ring_path(CULPRIT).with_extension("sock").exists());
}

#[test]
fn over_tcp_an_endpoint_requires_the_token_and_lists_its_peers() {
    let secret = Secret::from_text("of this test");
    let change = |config: &mut rcomm::Config| {
        config.secret = Some(secret.clone());
        config.endpoint = EndpointChoice::Tcp(([127, 0, 0, 1], 0).into());
    };
    on_threads(2, &Carrier::Cpu, change, |world| {
        let address = world.endpoint().unwrap().clone();
        world.group().barrier().unwrap();
        let unauthorized = EndpointClient::new(address.clone(), None);
        let error = unauthorized.status(soon()).unwrap_err().to_string();
        assert!(error.contains("token"), "{error}");
        let token = EndpointToken::new("another-token-long-enough".to_owned()).unwrap();
        let unauthorized = EndpointClient::new(address.clone(), Some(token));
        assert!(unauthorized.status(soon()).is_err());
        let client = EndpointClient::new(address, Some(secret.endpoint_token()));
        let status = client.status(soon()).unwrap();
        assert_eq!(status.identity.rank, Some(world.rank()));
        let peers = client.peers(soon()).unwrap();
        let ranks: Vec<Rank> = peers.iter().map(|peer| peer.rank).collect();
        assert_eq!(ranks, [1 - world.rank()]);
        world.group().barrier().unwrap();
        world.shutdown().unwrap();
    });
}

/// The status and the body of the answer to a request without a body.
fn ask(address: &EndpointAddress, token: &str, request: &str) -> (u16, String) {
    let EndpointAddress::Tcp(address) = address else {
        panic!("{address}: not over TCP");
    };
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    let text = format!(
        "{request} HTTP/1.1\r\nHost: rank\r\nAuthorization: Bearer {token}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

#[test]
fn waits_are_counted_and_shown_at_the_endpoint_while_they_last() {
    const TOKEN: &str = "the-token-of-this-test";
    let change = |config: &mut rcomm::Config| {
        config.endpoint_token = Some(EndpointToken::new(TOKEN).unwrap());
        config.endpoint = EndpointChoice::Tcp(([127, 0, 0, 1], 0).into());
    };
    on_threads(2, &Carrier::Cpu, change, |world| {
        let address = world.endpoint().unwrap().clone();
        let waits = |name: &str| -> WaitStatistics {
            let (status, body) = ask(&address, TOKEN, "GET /waits");
            assert_eq!(status, 200, "{body}");
            let waits: Vec<WaitStatistics> = serde_json::from_str(&body).unwrap();
            let found = waits.into_iter().find(|wait| wait.name == name);
            found.unwrap_or_else(|| panic!("{name}: {body}"))
        };
        assert_eq!(waits("rcomm.rendezvous").count, 1);
        assert!(waits("rcomm.store").count >= 1);
        assert_eq!(waits("rcomm.work").count, 0);
        // Rank 0 waits in a barrier that rank 1 enters only once rank 0 was seen to wait.
        if world.rank() == 0 {
            let work = world.group().barrier_async().unwrap();
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| work.join().map(drop));
                wait_until("the wait to be shown", || {
                    let wait = waits("rcomm.work");
                    (wait.waiting == 1 && wait.waiting_ns > 0).then_some(())
                });
                let (status, text) = ask(&address, TOKEN, "GET /metrics");
                assert_eq!(status, 200, "{text}");
                let line = "rcomm_waiting_threads{rank=\"0\",wait=\"rcomm.work\"} 1\n";
                assert!(text.contains(line), "{text}");
                world.store().set("rank 0 waits", b"").unwrap();
                waiter.join().unwrap().unwrap();
            });
        } else {
            let limit = Duration::from_secs(20);
            world.store().wait(&["rank 0 waits"], limit).unwrap();
            world.group().barrier().unwrap();
        }
        if world.rank() == 0 {
            let ended = waits("rcomm.work");
            assert_eq!((ended.count, ended.waiting, ended.waiting_ns), (1, 0, 0));
            assert!(
                ended.max_ns > 0 && ended.max_ns == ended.total_ns,
                "{ended:?}"
            );
        }
        let (status, body) = ask(&address, TOKEN, "GET /threads");
        assert_eq!(status, 200, "{body}");
        let threads: Vec<OwnThread> = serde_json::from_str(&body).unwrap();
        let watchdog = threads
            .iter()
            .find(|thread| thread.name.starts_with("rcomm/watchdog"));
        assert!(watchdog.is_some(), "{body}");
        let own = world.wait_counter("data-loader").unwrap();
        drop(own.begin());
        assert_eq!(waits("data-loader").count, 1);
        assert_eq!(world.waits().last().unwrap().name, "data-loader");
        assert!(world.wait_counter("rcomm.own").is_err());
        world.group().barrier().unwrap();
        world.shutdown().unwrap();
    });
}

#[test]
fn an_endpoint_answers_by_the_programs_own_handlers_and_changes_time_outs() {
    const TOKEN: &str = "the-token-of-this-test";
    let change = |config: &mut rcomm::Config| {
        config.endpoint_token = Some(EndpointToken::new(TOKEN).unwrap());
        config.endpoint = EndpointChoice::Tcp(([127, 0, 0, 1], 0).into());
    };
    on_threads(1, &Carrier::Cpu, change, |world| {
        let address = world.endpoint().unwrap().clone();
        let ask = |request: &str| ask(&address, TOKEN, request);
        assert_eq!(ask("GET /ping"), (200, "pong\n".to_owned()));
        world
            .handle("rate", |parameters| {
                let rate = parameters.get("set").ok_or("set=RATE is missing")?;
                Ok(format!("the rate is {rate}"))
            })
            .unwrap();
        assert_eq!(ask("GET /handlers").1, r#"["rate","timeouts"]"#);
        assert_eq!(
            ask("POST /handlers/rate?set=0.1"),
            (200, "the rate is 0.1".to_owned())
        );
        assert_eq!(
            ask("POST /handlers/rate"),
            (400, "set=RATE is missing".to_owned())
        );
        assert_eq!(ask("POST /handlers/other").0, 404);
        // A GET must not change anything.
        assert_eq!(ask("GET /handlers/rate?set=1").0, 405);

        let (status, answer) = ask("POST /handlers/timeouts?ms=12345");
        assert_eq!(
            (status, answer.as_str()),
            (200, "time-out of 1 of this rank's groups: 12345 ms\n")
        );
        assert_eq!(world.group().timeout(), Duration::from_millis(12345));
        assert_eq!(ask("POST /handlers/timeouts?ms=0").0, 400);
        let refusal = |name: &str| {
            let error = world.handle(name, |_| Ok(String::new())).unwrap_err();
            error.to_string()
        };
        assert!(refusal("timeouts").contains("the world's own"));
        for name in ["Rate", "", "a/b", &"x".repeat(65)] {
            assert!(refusal(name).contains("cannot name a handler"), "{name:?}");
        }
        world.shutdown().unwrap();
    });
}
