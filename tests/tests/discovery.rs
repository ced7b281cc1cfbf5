//! A job is found through its store: its ranks, and the instances of `rcomm-web` on its hosts.
#![allow(clippy::unwrap_used)]

use rcomm::store::StoreAccess;
use rcomm::{EndpointAddress, Secret, Store, TcpStore};
use rcomm_analyzer::Source;
use rcomm_analyzer::source::{EndpointSource, HostPort, Seen, hosts_in_store};
use rcomm_recorder::publish::EndpointNotice;
use rcomm_tests::fault::Fault;
use rcomm_tests::process::{Job, free_port, wait_until};
use rcomm_web::{NodeSource, Nodes};
use std::time::{Duration, Instant};

const RANKS: u32 = 4;

/// A deadline for a request.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Starts a job that hangs; returns it with the address of its store.
fn hang() -> (Job, HostPort) {
    let port = free_port();
    let program = env!("CARGO_BIN_EXE_rank");
    let job = Job::start(program, RANKS, Fault::StopJoining, |_, command| {
        command
            .env("MASTER_PORT", port.to_string())
            .env("RCOMM_TIMEOUT_MS", "600000");
    });
    let host = "127.0.0.1".to_owned();
    (job, HostPort { host, port })
}

/// Polls the source until it has returned a record of every rank.
fn poll_until_all_are_seen(source: &mut dyn Source) {
    let mut seen = [false; RANKS as usize];
    wait_until("a record of every rank", || {
        for observation in source.poll(soon()).ok()?.observations {
            let is_changed = matches!(observation.seen, Seen::Changed(_));
            seen[observation.rank as usize] |= is_changed;
        }
        seen.iter().all(|seen| *seen).then_some(())
    });
}

#[test]
fn ranks_are_found_through_the_store_of_their_job() {
    let (_job, store) = hang();
    poll_until_all_are_seen(&mut EndpointSource::in_store(store.clone(), None));
    let hosts = hosts_in_store(&store, soon()).unwrap();
    assert_eq!(hosts, [own_host()]);
}

fn own_host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_str().unwrap().to_owned()
}

#[test]
fn instances_on_the_nodes_are_found_through_the_store_of_the_job() {
    let (job, store) = hang();
    wait_until("the hosts of the job in its store", || {
        hosts_in_store(&store, soon()).ok()
    });
    // The ranks are on one host: their store requires a proof of the user's secret.
    let access = StoreAccess::Secret(Secret::of_user().unwrap());
    let wait = Duration::from_secs(20);
    let client = TcpStore::connect_with(&*store.host, store.port, wait, &access).unwrap();
    // Ranks publish their host's name; on a test machine only the loopback address is sure to reach the host.
    for rank in 0..RANKS {
        let notice = EndpointNotice {
            address: EndpointAddress::Unix(job.ring_path(rank).with_extension("sock")),
            host: "127.0.0.1".to_owned(),
        };
        let text = serde_json::to_vec(&notice).unwrap();
        let key = EndpointNotice::store_key(0, rank);
        wait_until("the rank to publish its endpoint", || {
            client.check(&[&key]).unwrap().then_some(())
        });
        client.set(&key, &text).unwrap();
    }
    let page = rcomm_web::serve(rcomm_web::Options {
        ring_dir: Some(job.folder().join("rings")),
        ..rcomm_web::Options::default()
    })
    .unwrap();
    let nodes = Nodes::Store {
        store: store.clone(),
        port: page.address().port(),
        scheme: "http".to_owned(),
    };
    let mut sources = NodeSource::all(nodes, Some(page.token())).unwrap();
    assert_eq!(sources.len(), 1, "four ranks of one host need one source");
    assert_eq!(sources[0].name(), format!("node 0 of store {store}"));
    poll_until_all_are_seen(&mut *sources[0]);
}
