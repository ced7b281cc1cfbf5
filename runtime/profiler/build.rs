//! NCCL unloads a profiler plug-in with its last communicator and loads it again with the next one. The ring has to
//! outlive that, so the library stays loaded.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
