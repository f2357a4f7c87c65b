//! Link settings of the NIF library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // A purge of the Erlang module closes the library, but runtime threads may still be in its code
    // for a moment: the mapping must outlive every close.
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
