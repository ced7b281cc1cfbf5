//! The errors where NCCL or the CUDA driver is missing, or the file is another library.
#![allow(clippy::unwrap_used)]

use rcomm::backend::nccl::{CudaDriver, NcclLibrary, NcclOptions, Search};
use rcomm::config::RingDir;
use rcomm::{Config, ErrorKind, HashStore, Rendezvous, World};
use std::path::PathBuf;
use std::sync::Arc;

#[test]
fn missing_library_is_an_error_that_lists_what_was_tried() {
    let path = PathBuf::from("/nonexistent/libnccl.so.2");
    let error = NcclLibrary::load(&Search {
        explicit: Some(path),
        python_prefix: None,
    })
    .err()
    .expect("not there");
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(
        error.to_string().contains("/nonexistent/libnccl.so.2"),
        "{error}"
    );
    assert!(error.to_string().contains("RCOMM_NCCL_LIB"), "{error}");
}

#[test]
fn library_of_another_kind_is_refused_by_its_missing_symbol() {
    let libc = PathBuf::from("libc.so.6");
    let error = NcclLibrary::load(&Search {
        explicit: Some(libc),
        python_prefix: None,
    })
    .err()
    .expect("not NCCL");
    assert!(
        error.to_string().contains("no symbol ncclGetVersion"),
        "{error}"
    );
}

#[test]
fn missing_driver_is_an_error_that_names_the_file() {
    let path = PathBuf::from("/nonexistent/libcuda.so.1");
    let error = CudaDriver::load(Some(&path)).err().expect("not there");
    assert!(
        error.to_string().contains("/nonexistent/libcuda.so.1"),
        "{error}"
    );
}

#[test]
fn a_world_without_a_driver_says_what_was_tried() {
    let mut config = Config {
        backend: "cpu:cpu,cuda:nccl".to_owned(),
        rendezvous: Some(Rendezvous::explicit(0, 1, "127.0.0.1", 1).unwrap()),
        ring_dir: RingDir::Memory,
        ..Config::default()
    };
    config.backend_options.set(NcclOptions {
        driver: Some(PathBuf::from("/nonexistent/libcuda.so.1")),
        ..NcclOptions::default()
    });
    let world = World::builder(config).store(Arc::new(HashStore::new()));
    let error = world.init().expect_err("no driver");
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(
        error
            .to_string()
            .contains("tried /nonexistent/libcuda.so.1"),
        "{error}"
    );
}
