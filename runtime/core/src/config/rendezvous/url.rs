//! The forms of `init_method` in `torch.distributed.init_process_group`: `env://`, `tcp://HOST:PORT`, `file://PATH`.

use super::{Rendezvous, refused};
use crate::op::error::Result;
use rcomm_recorder::model::Rank;
use std::path::PathBuf;
use std::str::FromStr;

/// The place that a URL names, at which the ranks of a job meet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum InitMethod {
    /// At the store that the launcher's variables name.
    Environment,
    /// At a store that rank 0 serves.
    Tcp(Rendezvous),
    /// In a file.
    File(PathBuf, Rendezvous),
}

impl InitMethod {
    /// Reads a URL. `rank` and `world_size` may also be in its query (`?rank=0&world_size=4`).
    ///
    /// # Errors
    /// `Rendezvous` says what is missing or wrong.
    pub(crate) fn parse(url: &str, rank: Option<Rank>, world_size: Option<u32>) -> Result<Self> {
        let wrong = |problem: &str| refused(format!("the URL {url:?} {problem}"));
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| wrong("has no scheme: env://, tcp:// or file://"))?;
        if scheme == "env" {
            return Ok(Self::Environment);
        }
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (mut rank, mut world_size) = (rank, world_size);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("rank", value)) => {
                    rank = Some(number(value).ok_or_else(|| wrong("has a rank that is no number"))?)
                }
                Some(("world_size", value)) => {
                    let size =
                        number(value).ok_or_else(|| wrong("has a world_size that is no number"))?;
                    world_size = Some(size);
                }
                _ => {
                    return Err(wrong(
                        "may have rank=N and world_size=N in its query, and nothing else",
                    ));
                }
            }
        }
        let rank = rank.ok_or_else(|| wrong("needs a rank: add rank=N to its query"))?;
        let world_size =
            world_size.ok_or_else(|| wrong("needs a world_size: add world_size=N to its query"))?;
        match scheme {
            "tcp" => {
                let place = place.trim_end_matches('/');
                let (host, port) = place
                    .rsplit_once(':')
                    .ok_or_else(|| wrong("names no port"))?;
                let port = number(port)
                    .ok_or_else(|| wrong("has a port that is no number from 1 to 65535"))?;
                let host = host.trim_start_matches('[').trim_end_matches(']');
                if host.is_empty() {
                    return Err(wrong("names no host"));
                }
                Rendezvous::explicit(rank, world_size, host, port).map(Self::Tcp)
            }
            "file" => {
                let path = PathBuf::from(place);
                let name = path.file_name().ok_or_else(|| wrong("names no file"))?;
                let job = name.to_string_lossy().into_owned();
                // No port is used, and no rank serves the store: the file is there for the others when a rank ends.
                let mut rendezvous = Rendezvous::explicit(rank, world_size, "127.0.0.1", 1)?;
                rendezvous.job = job;
                rendezvous.uses_agent_store = true;
                Ok(Self::File(path, rendezvous))
            }
            _ => Err(wrong("has a scheme other than env://, tcp:// and file://")),
        }
    }
}

fn number<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read() {
        let parse = |url| InitMethod::parse(url, None, None);
        assert_eq!(parse("env://").unwrap(), InitMethod::Environment);
        let InitMethod::Tcp(place) = parse("tcp://node0:29500?rank=1&world_size=4").unwrap() else {
            panic!("not read as a TCP address");
        };
        assert_eq!(
            (place.rank, place.world_size, place.master_port),
            (1, 4, 29500)
        );
        assert_eq!(place.master_addr, "node0");
        let ipv6 = InitMethod::parse("tcp://[::1]:29500", Some(0), Some(1)).unwrap();
        assert!(matches!(ipv6, InitMethod::Tcp(place) if place.master_addr == "::1"));
        let file = InitMethod::parse("file:///tmp/meet", Some(2), Some(3)).unwrap();
        let InitMethod::File(path, place) = file else {
            panic!("not read as a file");
        };
        assert_eq!(path, PathBuf::from("/tmp/meet"));
        assert_eq!((place.job.as_str(), place.rank), ("meet", 2));
        assert!(!place.serves_store());
    }

    #[test]
    fn a_wrong_url_gives_an_error_that_says_what_is_wrong() {
        for (url, expected) in [
            ("node0:29500", "has no scheme"),
            (
                "http://node0:1?rank=0&world_size=1",
                "has a scheme other than",
            ),
            ("tcp://node0?rank=0&world_size=1", "names no port"),
            ("tcp://:7?rank=0&world_size=1", "names no host"),
            (
                "tcp://node0:70000?rank=0&world_size=1",
                "has a port that is no number",
            ),
            ("tcp://node0:7?rank=x", "has a rank that is no number"),
            ("tcp://node0:7?rank=0", "needs a world_size"),
            ("tcp://node0:7", "needs a rank"),
            ("tcp://node0:7?color=1", "and nothing else"),
            ("file:///?rank=0&world_size=1", "names no file"),
            (
                "tcp://node0:7?rank=2&world_size=2",
                "ranks count from 0 to 1",
            ),
        ] {
            let error = InitMethod::parse(url, None, None).unwrap_err();
            assert!(error.to_string().contains(expected), "{url}: {error}");
        }
    }
}
