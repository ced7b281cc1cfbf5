//! Has the linker pack the relocations of the static binary, 1.9 MB of 43 otherwise. musl applies them since 1.2.4; a
//! program for glibc would need 2.36.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("musl") {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
