//! A null endpoint: takes every PUT, throws the body away, answers 200. What is measured against it is the client alone.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const HEAD_BYTES_MAX: usize = 64 * 1024;

/// Serves until its standard input ends.
pub fn run() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
    println!("{}", listener.local_addr()?.port());
    runtime.spawn(async move {
        loop {
            if let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream));
            }
        }
    });
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

async fn serve(mut stream: TcpStream) -> Option<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut filled = 0;
    loop {
        let end = loop {
            if let Some(at) = buffer
                .get(..filled)?
                .windows(4)
                .position(|four| four == b"\r\n\r\n")
            {
                break at + 4;
            }
            if filled >= HEAD_BYTES_MAX {
                return None;
            }
            match stream.read(buffer.get_mut(filled..)?).await {
                Ok(0) | Err(_) => return None,
                Ok(read) => filled += read,
            }
        };
        let head = String::from_utf8_lossy(buffer.get(..end)?).to_ascii_lowercase();
        let field = |name: &str| {
            head.lines()
                .find_map(|line| line.strip_prefix(name))
                .map(|rest| rest.trim_start_matches(':').trim().to_owned())
        };
        if field("expect").is_some() {
            stream
                .write_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                .await
                .ok()?;
        }
        let mut left = field("content-length")
            .and_then(|text| text.parse::<usize>().ok())
            .unwrap_or(0);
        left = left.saturating_sub(filled - end);
        while left > 0 {
            match stream.read(&mut buffer).await {
                Ok(0) | Err(_) => return None,
                Ok(read) => left = left.saturating_sub(read),
            }
        }
        filled = 0;
        let answer = b"HTTP/1.1 200 OK\r\netag: \"0\"\r\ncontent-length: 0\r\n\r\n";
        stream.write_all(answer).await.ok()?;
    }
}
