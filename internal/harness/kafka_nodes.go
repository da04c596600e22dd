package harness

import (
	"context"
	"net"

	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/walrelay/walrelay/internal/kafkaserver"
)

// startFake runs kfake in this process, so that it survives a walrelay that is killed. There is always a proxy before
// each of its brokers: that is how they can be killed, paused and cut off although they are no processes.
func (c *Cluster) startFake(o *kafkaOptions) {
	c.t.Helper()
	c.owned = true
	for range o.nodes {
		c.Proxies = append(c.Proxies, StartProxy(c.t, ""))
	}
	next := 0
	listen := func(network, address string) (net.Listener, error) {
		l, err := net.Listen(network, address)
		if err != nil {
			return nil, err
		}
		p := c.Proxies[next]
		next++
		p.SetTarget(l.Addr().String())
		return &advertised{Listener: l, addr: p.listener.Addr()}, nil
	}
	options := []kfake.Opt{kfake.NumBrokers(o.nodes), kfake.ListenFn(listen), kfake.DefaultNumPartitions(1)}
	if len(o.settings) > 0 {
		options = append(options, kfake.BrokerConfigs(o.settings))
	}
	fake, err := kfake.NewCluster(append(options, o.fake...)...)
	if err != nil {
		c.t.Fatalf("start kfake: %v", err)
	}
	c.t.Cleanup(fake.Close)
	c.fake = fake
	c.brokers = proxyAddrs(c.Proxies)
}

// advertised is a listener that gives its proxy's address as its own. kfake tells its clients what Addr says.
type advertised struct {
	net.Listener
	addr net.Addr
}

// Addr is the proxy's.
func (l *advertised) Addr() net.Addr { return l.addr }

func proxyAddrs(proxies []*Proxy) []string {
	var addrs []string
	for _, p := range proxies {
		addrs = append(addrs, p.Addr())
	}
	return addrs
}

// startReal starts brokers, or takes the shared one.
func (c *Cluster) startReal(o *kafkaOptions) {
	c.t.Helper()
	options := kafkaserver.Options{Nodes: o.nodes, Settings: o.settings}
	if o.proxy {
		for range o.nodes {
			c.Proxies = append(c.Proxies, StartProxy(c.t, ""))
		}
		options.Advertised = proxyAddrs(c.Proxies)
	}
	start := func() (*kafkaserver.Cluster, error) {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		return kafkaserver.Start(ctx, options)
	}
	var err error
	if c.owned = o.dedicated; c.owned {
		if c.real, err = start(); err == nil {
			watch(c.t, c.real.Dir())
			c.t.Cleanup(func() {
				if err := c.real.Close(); err != nil {
					c.t.Errorf("close the test's Kafka: %v", err)
				}
			})
		}
	} else {
		c.real, err = get(shared, "kafka", start, (*kafkaserver.Cluster).Dir)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	c.brokers = c.real.Brokers()
	for i, p := range c.Proxies {
		p.SetTarget(c.brokers[i])
	}
	if o.proxy {
		c.brokers = options.Advertised
	}
}

// Kill ends a broker as SIGKILL does. A killed kfake broker is one that nobody can reach; what it had already received
// it still carries out, as a broker may that dies a moment later.
//
// A real broker answers EndTxn before the commit's markers are in the topics. When the only broker is killed between the
// two, Kafka 4.3.1 has been seen to come back with the transaction complete in the coordinator and open in the partition,
// for good: read_committed stops there. A test that is not about this waits with WaitCommitted first, or asks for three
// nodes.
func (c *Cluster) Kill(node int) {
	c.t.Helper()
	c.nodeOp("kill", node, (*kafkaserver.Cluster).Kill, func(p *Proxy) {
		p.Refuse()
		p.Cut()
	})
}

// Restart brings a killed broker back, with its data, on its address. One that runs is stopped first.
func (c *Cluster) Restart(node int) {
	c.t.Helper()
	restart := func(k *kafkaserver.Cluster, node int) error {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		return k.Restart(ctx, node)
	}
	c.nodeOp("restart", node, restart, func(p *Proxy) {
		p.Cut()
		p.Accept()
		p.Release()
	})
}

// Pause freezes a broker: its connections stay open and nothing answers.
func (c *Cluster) Pause(node int) {
	c.t.Helper()
	c.nodeOp("pause", node, (*kafkaserver.Cluster).Pause, func(p *Proxy) { p.Hold(Both) })
}

// Resume lets a paused broker go on.
func (c *Cluster) Resume(node int) {
	c.t.Helper()
	c.nodeOp("resume", node, (*kafkaserver.Cluster).Resume, func(p *Proxy) { p.Release() })
}

// nodeOp does something to a broker: to the process where it is one, else to the proxy before kfake's.
func (c *Cluster) nodeOp(verb string, node int, onReal func(*kafkaserver.Cluster, int) error, onFake func(*Proxy)) {
	c.t.Helper()
	switch {
	case !c.owned:
		c.t.Fatalf("%s broker %d: it is not this test's own: ask for OwnKafka()", verb, node)
	case c.fake != nil:
		onFake(c.Proxies[node])
	default:
		if err := onReal(c.real, node); err != nil {
			c.t.Fatalf("%s broker %d: %v", verb, node, err)
		}
	}
}

// BrokerLog is what a real broker has logged; empty for the others.
func (c *Cluster) BrokerLog(node int) string {
	if c.real == nil {
		return ""
	}
	return c.real.Log(node)
}
