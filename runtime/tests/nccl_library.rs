//! Errors if NCCL or the CUDA driver is missing, or if the file is another library.
#![allow(clippy::unwrap_used)]

use rcomm::backend::nccl::{CudaDriver, NcclLibrary, NcclOptions, Search};
use rcomm::config::RingDir;
use rcomm::{Config, ErrorKind, HashStore, Rendezvous, World};
use std::path::PathBuf;
use std::sync::Arc;

#[test]
fn error_of_a_missing_library_lists_what_was_tried() {
    let path = PathBuf::from("/nonexistent/libnccl.so.2");
    let error = NcclLibrary::load(&Search {
        explicit: Some(path),
        python_prefix: None,
    })
    .err()
    .expect("the library must not load");
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(
        error.to_string().contains("/nonexistent/libnccl.so.2"),
        "{error}"
    );
    assert!(error.to_string().contains("RCOMM_NCCL_LIB"), "{error}");
}

#[test]
fn another_library_is_refused_with_the_name_of_the_missing_symbol() {
    let libc = PathBuf::from("libc.so.6");
    let error = NcclLibrary::load(&Search {
        explicit: Some(libc),
        python_prefix: None,
    })
    .err()
    .expect("the C library must be refused");
    assert!(
        error.to_string().contains("no symbol ncclGetVersion"),
        "{error}"
    );
}

#[test]
fn error_of_a_missing_driver_names_the_file() {
    let path = PathBuf::from("/nonexistent/libcuda.so.1");
    let error = CudaDriver::load(Some(&path)).err();
    let error = error.expect("the driver must not load");
    assert!(
        error.to_string().contains("/nonexistent/libcuda.so.1"),
        "{error}"
    );
}

#[test]
fn error_of_a_world_without_a_driver_lists_what_was_tried() {
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
    let error = world.init().expect_err("the world must not start");
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(
        error
            .to_string()
            .contains("tried /nonexistent/libcuda.so.1"),
        "{error}"
    );
}
