//! A collector and a node: a real server, a real socket.

use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::SimulatedSource;
use rcomm_analyzer::{LiveOptions, Pace};
use rcomm_web::{Access, Board, NodeSource, Nodes, Server};
use std::time::{Duration, Instant};

const TOKEN: &str = "0123456789abcdef";

fn pace() -> Pace {
    Pace {
        refresh: Duration::from_millis(500),
        timeout: Duration::from_secs(2),
    }
}

#[test]
fn a_wrong_token_is_told_as_such() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("threads");
    let whole = SimulatedSource::new(Simulation::new(Situation::Healthy, 4, 0), || 5_000_000_000);
    let (board, _watch) =
        Board::watch(vec![Box::new(whole)], LiveOptions::default(), pace()).expect("threads");
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = runtime.block_on(Server::bind(address, board, Access::with_token(TOKEN)));
    let server = server.expect("a free port");
    let url = format!("http://{}", server.address());
    runtime.spawn(server.run(std::future::pending()));
    let mut sources = NodeSource::all(Nodes::List(vec![url]), Some("another")).expect("a list");
    let error = sources[0]
        .poll(Instant::now() + Duration::from_secs(20))
        .expect_err("refused");
    assert!(
        error.to_string().contains("it refused the token"),
        "{error}"
    );
}
