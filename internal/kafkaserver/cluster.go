package kafkaserver

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/walrelay/walrelay/internal/child"
)

const (
	// startTimeout bounds the wait for a broker to be registered and unfenced. A JVM on a busy two-core machine takes
	// ten seconds, three of them together thirty.
	startTimeout = 2 * time.Minute

	// stopGrace is for a controlled shutdown; a broker that is the last one of its quorum may never complete it.
	stopGrace = 20 * time.Second
)

// Options say which cluster to start. The zero value: one node.
type Options struct {
	// Nodes is 1 or 3. With three, topics are replicated three times and min.insync.replicas is 2.
	Nodes int
	// Settings are added to every node's server.properties.
	Settings map[string]string
	// Advertised are the host:port pairs that clients are told to connect to, one per node: where a proxy stands in
	// front. Empty: the brokers' own.
	Advertised []string
	// HeapMiB per node; 0 means 512.
	HeapMiB int
}

// Cluster is a running Kafka cluster. Nodes are counted from 0 in every method (Kafka's own node.id is one more). Its
// methods are not to be called concurrently. The brokers end with this process (on Linux; elsewhere Close must have
// been called).
type Cluster struct {
	options Options
	dir     string
	libs    string
	nodes   []*node
}

type node struct {
	id                        int
	client, internal, control int // ports
	properties, data, logFile string
	process                   *child.Process
}

// Start formats and starts a cluster in a temporary directory and returns once every node serves requests. The caller
// must Close it. An error that is ErrMissing says what to install.
func Start(ctx context.Context, options Options) (*Cluster, error) {
	if options.Nodes == 0 {
		options.Nodes = 1
	}
	if options.HeapMiB == 0 {
		options.HeapMiB = 512
	}
	if n := len(options.Advertised); n != 0 && n != options.Nodes {
		return nil, fmt.Errorf("start Kafka: %d advertised addresses for %d nodes: give one each", n, options.Nodes)
	}
	libs, err := Install(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "walrelay-kafka-")
	if err != nil {
		return nil, fmt.Errorf("create Kafka's directory: %w", err)
	}
	c := &Cluster{options: options, dir: dir, libs: libs}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	if err := c.layOut(); err != nil {
		return err
	}
	id := make([]byte, 16)
	rand.Read(id) // never fails
	clusterID := base64.RawURLEncoding.EncodeToString(id)
	for _, n := range c.nodes {
		// In one word: one id in 64 begins with a dash.
		cmd := c.java("kafka.tools.StorageTool", "format", "--cluster-id="+clusterID, "-c", n.properties)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("format Kafka's node %d: %w: %s", n.id, err, lastLines(string(out), 3))
		}
	}
	for _, n := range c.nodes {
		if err := c.launch(n); err != nil {
			return err
		}
	}
	for _, n := range c.nodes {
		if err := c.waitReady(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// Brokers are the clients' ports of the brokers themselves, whatever they advertise.
func (c *Cluster) Brokers() []string {
	var addrs []string
	for _, n := range c.nodes {
		addrs = append(addrs, local(n.client))
	}
	return addrs
}

// Dir is the temporary directory that holds everything of this cluster.
func (c *Cluster) Dir() string { return c.dir }

// Log is what a node has logged so far.
func (c *Cluster) Log(node int) string {
	text, err := os.ReadFile(c.nodes[node].logFile)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// Kill ends a node with SIGKILL and waits for its end.
func (c *Cluster) Kill(node int) error {
	return c.nodes[node].process.End(syscall.SIGKILL, stopGrace)
}

// Stop shuts a node down in a controlled way; after 20 s it is killed.
func (c *Cluster) Stop(node int) error {
	return c.nodes[node].process.End(syscall.SIGTERM, stopGrace)
}

// Pause freezes a node with SIGSTOP: its connections stay open and nothing answers.
func (c *Cluster) Pause(node int) error { return c.nodes[node].process.Signal(syscall.SIGSTOP) }

// Resume lets a paused node go on.
func (c *Cluster) Resume(node int) error { return c.nodes[node].process.Signal(syscall.SIGCONT) }

// Restart starts a node again on its ports and data, stopping it first if it runs, and waits until it serves requests.
func (c *Cluster) Restart(ctx context.Context, node int) error {
	if err := c.Stop(node); err != nil {
		return err
	}
	n := c.nodes[node]
	if err := c.launch(n); err != nil {
		return err
	}
	return c.waitReady(ctx, n)
}

// Close kills all nodes and removes their data.
func (c *Cluster) Close() error {
	var errs []error
	for _, n := range c.nodes {
		if n.process != nil {
			errs = append(errs, n.process.End(syscall.SIGKILL, stopGrace))
		}
	}
	return errors.Join(append(errs, os.RemoveAll(c.dir))...)
}

func (c *Cluster) java(args ...string) *exec.Cmd {
	// The serial collector and the first compiler tier: a broker of the tests lives for a minute, so what counts is how
	// fast it is up, and that three of them leave something of two cores.
	flags := []string{
		"-Xms128m", fmt.Sprintf("-Xmx%dm", c.options.HeapMiB), "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto",
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true",
		// The one line at info that is read here: see waitReady.
		"-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
		"-cp", filepath.Join(c.libs, "*"),
	}
	return exec.Command("java", append(flags, args...)...)
}

func (c *Cluster) launch(n *node) error {
	log, err := os.OpenFile(n.logFile, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open the log of Kafka's node %d: %w", n.id, err)
	}
	defer log.Close() // the broker has a descriptor of its own
	cmd := c.java("kafka.Kafka", n.properties)
	cmd.Stdout, cmd.Stderr = log, log
	n.process, err = child.Start(cmd, child.Identity{}, syscall.SIGKILL)
	if err != nil {
		return fmt.Errorf("start Kafka's node %d: %w", n.id, err)
	}
	return nil
}

// waitReady waits for the broker's own word. An open port would not do: the broker listens before it is unfenced, and
// until then it is no leader of anything.
func (c *Cluster) waitReady(ctx context.Context, n *node) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.NewTimer(startTimeout)
	defer deadline.Stop()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("start Kafka's node %d: %w", n.id, context.Cause(ctx))
		case <-n.process.Done():
			return fmt.Errorf("start Kafka's node %d: it ended at once: %s", n.id, lastLines(c.Log(n.id), 5))
		case <-deadline.C:
			return fmt.Errorf("start Kafka's node %d: not ready within %s: %s", n.id, startTimeout, lastLines(c.Log(n.id), 5))
		case <-tick.C:
			if strings.Contains(c.Log(n.id), "Kafka Server started") {
				return nil
			}
		}
	}
}

// layOut chooses ports and writes each node's properties.
func (c *Cluster) layOut() error {
	ports, err := freePorts(3 * c.options.Nodes)
	if err != nil {
		return err
	}
	var voters []string
	for i := range c.options.Nodes {
		base := filepath.Join(c.dir, fmt.Sprintf("node%d", i))
		n := &node{
			id: i, client: ports[3*i], internal: ports[3*i+1], control: ports[3*i+2],
			properties: base + ".properties", data: base + ".data", logFile: base + ".log",
		}
		c.nodes = append(c.nodes, n)
		voters = append(voters, fmt.Sprintf("%d@%s", n.id+1, local(n.control)))
	}
	for i, n := range c.nodes {
		advertised := local(n.client)
		if len(c.options.Advertised) > 0 {
			advertised = c.options.Advertised[i]
		}
		text := c.properties(n, advertised, strings.Join(voters, ","))
		if err := os.WriteFile(n.properties, []byte(text), 0o644); err != nil {
			return fmt.Errorf("write the properties of Kafka's node %d: %w", n.id, err)
		}
	}
	return nil
}

// properties of one node. Brokers talk to each other on a listener of their own, so that a proxy before the clients'
// listener cuts clients off and not the cluster apart.
func (c *Cluster) properties(n *node, advertised, voters string) string {
	replicas, insync := c.options.Nodes, 1
	if replicas >= 3 {
		insync = 2
	}
	var b strings.Builder
	line := func(key, format string, args ...any) { fmt.Fprintf(&b, key+"="+format+"\n", args...) }
	line("process.roles", "broker,controller")
	line("node.id", "%d", n.id+1)
	line("controller.quorum.voters", "%s", voters)
	line("listeners", "PLAINTEXT://%s,INTERNAL://%s,CONTROLLER://%s", local(n.client), local(n.internal), local(n.control))
	line("advertised.listeners", "PLAINTEXT://%s,INTERNAL://%s", advertised, local(n.internal))
	line("inter.broker.listener.name", "INTERNAL")
	line("controller.listener.names", "CONTROLLER")
	line("listener.security.protocol.map", "CONTROLLER:PLAINTEXT,INTERNAL:PLAINTEXT,PLAINTEXT:PLAINTEXT")
	line("log.dirs", "%s", n.data)
	line("auto.create.topics.enable", "false")
	line("default.replication.factor", "%d", replicas)
	line("min.insync.replicas", "%d", insync)
	line("offsets.topic.replication.factor", "%d", replicas)
	line("offsets.topic.num.partitions", "3")
	line("transaction.state.log.replication.factor", "%d", replicas)
	line("transaction.state.log.min.isr", "%d", insync)
	line("transaction.state.log.num.partitions", "3")
	line("share.coordinator.state.topic.replication.factor", "%d", replicas)
	line("share.coordinator.state.topic.min.isr", "%d", insync)
	line("group.initial.rebalance.delay.ms", "0")
	for key, value := range c.options.Settings { // order does not matter: the keys differ, and the last line wins
		line(key, "%s", value)
	}
	return b.String()
}

func local(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// freePorts asks the kernel for n ports at once, so that they differ.
func freePorts(n int) ([]int, error) {
	var ports []int
	var listeners []net.Listener
	defer func() { // all of them at the end, for the reason above
		for _, l := range listeners {
			_ = l.Close() // nobody has connected
		}
	}()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		listeners = append(listeners, l)
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}
