//! As much of the RabbitMQ stream protocol as it takes to fill a stream and to empty one, on blocking sockets.
//!
//! Owns frames. Parses no record: what a client library does with them is not what is measured.

use std::io::{BufReader, Error, ErrorKind, Read, Write};
use std::net::TcpStream;

const DECLARE_PUBLISHER: u16 = 1;
pub const PUBLISH: u16 = 2;
pub const PUBLISH_CONFIRM: u16 = 3;
const SUBSCRIBE: u16 = 7;
pub const DELIVER: u16 = 8;
const CREDIT: u16 = 9;
const PEER_PROPERTIES: u16 = 17;
const SASL_HANDSHAKE: u16 = 18;
const SASL_AUTHENTICATE: u16 = 19;
const TUNE: u16 = 20;
const OPEN: u16 = 21;
const RESPONSE: u16 = 0x8000;
const OK: u16 = 1;
const READ_BYTES: usize = 1 << 20;
const FRAME_BYTES_MAX: usize = 256 << 20;

/// A connection that is logged in as guest.
pub struct Connection {
    input: BufReader<TcpStream>,
    output: TcpStream,
    frame: Vec<u8>,
    correlation: u32,
}

impl Connection {
    /// Connects to a broker on loopback.
    pub fn open(port: u16) -> Result<Self, Error> {
        let output = TcpStream::connect(("127.0.0.1", port))?;
        output.set_nodelay(true)?;
        let mut connection = Self {
            input: BufReader::with_capacity(READ_BYTES, output.try_clone()?),
            output,
            frame: Vec::new(),
            correlation: 0,
        };
        connection.request(PEER_PROPERTIES, &0u32.to_be_bytes())?;
        connection.request(SASL_HANDSHAKE, b"")?;
        let secret = b"\0guest\0guest";
        let login = [
            &string("PLAIN")[..],
            &(secret.len() as u32).to_be_bytes(),
            secret,
        ]
        .concat();
        connection.request(SASL_AUTHENTICATE, &login)?;
        while connection.receive()? != TUNE {}
        // The server's frame limit, and no heartbeats.
        let limits = [connection.body().get(..4).unwrap_or_default(), &[0; 4]].concat();
        connection.send(RESPONSE | TUNE, &limits)?;
        connection.request(OPEN, &string("/"))?;
        Ok(connection)
    }

    /// A second handle to write with while this one reads.
    pub fn writer(&self) -> Result<TcpStream, Error> {
        self.output.try_clone()
    }

    /// Declares publisher 0.
    pub fn declare_publisher(&mut self, stream: &str) -> Result<(), Error> {
        self.request(
            DECLARE_PUBLISHER,
            &[&[0][..], &string(""), &string(stream)].concat(),
        )
    }

    /// Subscribes from an offset with that much credit.
    pub fn subscribe(&mut self, stream: &str, offset: u64, credit: u16) -> Result<(), Error> {
        let spec = [&4u16.to_be_bytes()[..], &offset.to_be_bytes()].concat();
        let parts = [
            &[0][..],
            &string(stream),
            &spec,
            &credit.to_be_bytes(),
            &[0; 4],
        ];
        self.request(SUBSCRIBE, &parts.concat())
    }

    /// Lets the broker send so many more chunks.
    pub fn credit(&mut self, chunks: u16) -> Result<(), Error> {
        self.send(CREDIT, &[&[0][..], &chunks.to_be_bytes()].concat())
    }

    /// The next frame's command; its body is in [`Self::body`].
    pub fn receive(&mut self) -> Result<u16, Error> {
        let mut length = [0; 4];
        self.input.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length) as usize;
        if !(4..=FRAME_BYTES_MAX).contains(&length) {
            return Err(ErrorKind::InvalidData.into());
        }
        self.frame.resize(length, 0);
        self.input.read_exact(&mut self.frame)?;
        number(&self.frame, 0).map(|command: [u8; 2]| u16::from_be_bytes(command))
    }

    /// What follows command and version.
    pub fn body(&self) -> &[u8] {
        self.frame.get(4..).unwrap_or_default()
    }

    fn send(&mut self, command: u16, body: &[u8]) -> Result<(), Error> {
        send(&mut self.output, command, body)
    }

    /// Sends a request and waits for its answer. A frame that comes before it is of the log-in, and is kept for later by nobody.
    fn request(&mut self, command: u16, body: &[u8]) -> Result<(), Error> {
        self.correlation += 1;
        let correlation = self.correlation.to_be_bytes();
        self.send(command, &[&correlation[..], body].concat())?;
        while self.receive()? != RESPONSE | command {}
        match u16::from_be_bytes(number(self.body(), 4)?) {
            OK => Ok(()),
            code => Err(Error::other(format!("command {command}: code {code}"))),
        }
    }
}

/// One frame.
pub fn send(output: &mut TcpStream, command: u16, body: &[u8]) -> Result<(), Error> {
    let length = 4 + u32::try_from(body.len()).map_err(Error::other)?;
    let mut frame = Vec::with_capacity(body.len() + 8);
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(&command.to_be_bytes());
    frame.extend_from_slice(&1u16.to_be_bytes());
    frame.extend_from_slice(body);
    output.write_all(&frame)
}

/// The bytes of a number at a place of a frame.
pub fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Error> {
    let part = bytes.get(at..at + N).and_then(|part| part.try_into().ok());
    part.ok_or_else(|| ErrorKind::InvalidData.into())
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u16).to_be_bytes()[..], text.as_bytes()].concat()
}
