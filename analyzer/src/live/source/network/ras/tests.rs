//! Tests against a server that answers as NCCL's documentation and sources describe.

use super::*;
use crate::input::ras::{MemberState, Process};
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};

/// The answers of a server of some version.
#[derive(Clone)]
struct Server {
    speaks_json: bool,
    report: &'static str,
    /// Sent to every monitor, before the connection is held open.
    events: &'static str,
}

fn serve(server: Server) -> HostPort {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let port = listener
        .local_addr()
        .expect("the socket has an address")
        .port();
    std::thread::spawn(move || {
        let (keep, kept) = channel();
        for stream in listener.incoming().flatten() {
            let (server, keep) = (server.clone(), keep.clone());
            // An error ends only this connection.
            let _ = answer(stream, &server, &keep);
        }
        drop(kept);
    });
    HostPort {
        host: "127.0.0.1".into(),
        port,
    }
}

fn answer(stream: TcpStream, server: &Server, keep: &Sender<TcpStream>) -> io::Result<()> {
    let mut out = stream.try_clone()?;
    for line in BufReader::new(stream).lines() {
        match line?.as_str() {
            "CLIENT PROTOCOL 2" => out.write_all(b"SERVER PROTOCOL 2\n")?,
            "SET FORMAT json" if server.speaks_json => out.write_all(b"OK\n")?,
            "VERBOSE STATUS" => return out.write_all(server.report.as_bytes()),
            "MONITOR all" if server.speaks_json => {
                out.write_all(b"OK\n")?;
                out.write_all(server.events.as_bytes())?;
                // Sending cannot fail: the receiver exists as long as the server's thread.
                let _ = keep.send(out);
                return Ok(());
            }
            other => writeln!(out, "ERROR: Unknown command {other}")?,
        }
    }
    Ok(())
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

const JSON: &str = r#"{
  "nccl_version": "2.29.1", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
  "timestamp": "2026-06-01 12:00:00", "communicators_count": 1,
  "communicators": [ {
    "hash": "27a079b828ff1a75", "secondary_hash": "0x1:0x2", "size": 4,
    "ranks_count": 3, "missing_ranks_count": 1,
    "ranks": [
      {"rank": 0, "host": "n000", "pid": 11, "cuda_dev": 0, "nvml_dev": 4,
       "status": {"init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false},
       "collective_counts": {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 42}},
      {"rank": 1, "host": "n000", "pid": 12, "cuda_dev": 0, "nvml_dev": 5,
       "status": {"init_state": 0, "async_error": 3, "finalize_called": false, "destroy_flag": false, "abort_flag": false},
       "collective_counts": {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 41}},
      {"rank": 2, "host": "n001", "pid": 13, "cuda_dev": 0, "nvml_dev": 0,
       "status": {"init_state": 7, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false},
       "collective_counts": {}}
    ],
    "missing_ranks": [
      {"rank": 3, "host": "n001", "pid": 14, "cuda_dev": 0, "nvml_dev": 1,
       "status": {"unresponsive": true, "considered_dead": true}}
    ]
  } ],
  "ras": {"collection_time_sec": 0.1, "timeouts_count": 0}
}"#;

const TEXT: &str = "NCCL version 2.24.3 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH
    1         4         1         8         8        32   RUNNING  INCOMPLETE

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#1-3 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 2 ranks
  The missing ranks: 5,7

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  29 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
  Rank 9 has launched up to operation 6600 -- GPU 1 managed by process 99 on node n001
";

#[test]
fn a_report_in_json_is_read_with_its_missing_ranks() {
    let address = serve(Server {
        speaks_json: true,
        report: JSON,
        events: "",
    });
    let mut source = RasSource::new(address);
    let poll = source.poll(soon()).expect("the server answers");
    let [communicator] = poll.communicators.as_slice() else {
        panic!(
            "the report lists one communicator: {:?}",
            poll.communicators
        );
    };
    assert_eq!((communicator.size, poll.world_size), (4, Some(4)));
    let states: Vec<_> = communicator
        .members
        .iter()
        .map(|m| m.state.clone())
        .collect();
    let expected = [
        MemberState::Running,
        MemberState::Failed("internal error".into()),
        MemberState::Initializing,
        MemberState::Dead,
    ];
    assert_eq!(states, expected);
    let first = &communicator.members[0];
    let process = Process {
        host: "n000".into(),
        pid: 11,
        device: Some(4),
    };
    assert_eq!(first.process, process);
    assert!(
        first.launched.contains(&("AllReduce".into(), 42)),
        "{first:?}"
    );
}

#[test]
fn a_report_in_text_names_the_members_that_differ() {
    let address = serve(Server {
        speaks_json: false,
        report: TEXT,
        events: "",
    });
    let poll = RasSource::new(address)
        .poll(soon())
        .expect("the server answers");
    assert_eq!(poll.world_size, Some(32));
    let communicator = |name: &str| {
        let found = poll.communicators.iter().find(|c| c.name == name);
        found.unwrap_or_else(|| panic!("{name} in {:?}", poll.communicators))
    };
    let uneven = communicator("27a079b828ff1a75");
    assert_eq!(uneven.others_launched, [("AllReduce".to_owned(), 6650)]);
    let launched: Vec<_> = uneven
        .members
        .iter()
        .map(|m| (m.rank, m.process.pid, m.launched[0].1))
        .collect();
    assert_eq!(
        launched,
        [
            (Some(0), 483_072, 6649),
            (Some(2), 483_074, 6649),
            (Some(9), 99, 6600)
        ]
    );
    assert_eq!(uneven.members[2].process.host, "n001");
    let missing = communicator("cf264af53edbe986");
    assert_eq!(missing.size, 8);
    let ranks: Vec<_> = missing.members.iter().map(|m| m.rank).collect();
    assert_eq!(ranks, [Some(5), Some(7)]);
    let dead = &communicator("").members[0];
    assert_eq!(
        (dead.process.pid, &dead.state),
        (3_487_984, &MemberState::Dead)
    );
}

#[test]
fn an_event_reports_a_death_before_the_next_report() {
    let address = serve(Server {
        speaks_json: true,
        report: JSON,
        events: r#"{
  "timestamp": "2026-06-01 12:00:01", "group": "LIFECYCLE", "event": "PEER_DEAD",
  "peer": {"host": "n000", "pid": 11, "cuda_devs": [0], "nvml_devs": [4]}, "details": "a } in \" text"
} {"event": "PEER_NEW"} nonsense"#,
    });
    let mut source = RasSource::new(address);
    let deadline = soon();
    loop {
        let poll = source.poll(deadline).expect("the server answers");
        if poll.communicators[0].members[0].state == MemberState::Dead {
            return;
        }
        assert!(Instant::now() < deadline, "{poll:?}");
        std::thread::yield_now();
    }
}

#[test]
fn a_server_that_is_not_ras_is_an_error_with_the_reason() {
    for (report, speaks_json) in [
        ("<html>", true),
        ("<html>", false),
        ("{\"x\": 1}", true),
        ("", true),
    ] {
        let address = serve(Server {
            speaks_json,
            report,
            events: "",
        });
        let error = RasSource::new(address).poll(soon()).expect_err(report);
        assert!(error.to_string().contains("is invalid"), "{error}");
    }
    // This socket has the port but never listens, so no other process can get the port.
    let unheard =
        socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket can be made");
    bind(&unheard, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
    let bound = getsockname(&unheard).expect("the socket has an address");
    let address = HostPort {
        host: "127.0.0.1".into(),
        port: SocketAddr::try_from(bound)
            .expect("the address is an IPv4 address")
            .port(),
    };
    let error = RasSource::new(address)
        .poll(soon())
        .expect_err("no server listens there");
    drop(unheard);
    assert!(error.to_string().contains("NCCL_RAS_ADDR"), "{error}");
}
